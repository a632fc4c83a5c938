"""Configuration of a runner: its models, agents and limits. weft_app builds it from weft.yaml."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from runner_svc.added_models import ModelAdder
from runner_svc.attached_servers import ServerAdder
from runner_svc.followed_servers import FollowedServer
from runner_svc.instance.settings import ServedModel
from runner_svc.memory.lease_manager import Observer
from runner_svc.runtimes.table import DEFAULT_RUNTIME
from runner_svc.settings import DEFAULT_DEVICE_SAMPLE_SECONDS
from runner_svc.supervise.leftovers import Leftovers
from runner_svc.tools.port import ToolSettings
from weft.api.registry.v1 import agent_pb2
from weft.kernel.tls_channel import ChannelSecurity


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """Configuration of one runner process."""

    name: str
    """Unique in the mesh."""
    runtime: str = DEFAULT_RUNTIME
    host: str
    address: str
    """Its address for others, as a gRPC target such as "unix:/path/runner.sock"."""
    registry_address: str
    security: ChannelSecurity = field(default_factory=ChannelSecurity)
    """Credentials and trusted CAs of calls that leave this machine."""
    session_file: Path
    """File that keeps the session id across restarts."""
    leftovers: Leftovers | None = None
    """Orphaned processes of an earlier incarnation, killed before the first backend starts. None: not tracked."""
    models: tuple[ServedModel, ...]
    agents: tuple[agent_pb2.AgentManifest, ...] = ()
    """The published agents. Read-only."""
    tools: tuple[ToolSettings, ...] = ()
    """Sources of the tools that the runner runs for models, see ToolRunner.settings."""
    followed: tuple[FollowedServer, ...] = ()
    """The servers of which it serves every model that they list."""
    adder: ModelAdder | None = None
    """What makes models of sources; None: the runner serves what its configuration names alone."""
    server_adder: ServerAdder | None = None
    """What makes servers of addresses that are attached while it runs; None: it attaches none."""
    observer: Observer | None = None
    """Observer of this host's accelerators; None: devices are not observed, and no memory is leased."""
    device_sample_seconds: float = DEFAULT_DEVICE_SAMPLE_SECONDS
    """Interval of samples of the accelerators while engines work on requests."""
    device_indexes: tuple[int, ...] = ()
    """Devices that its models may use; empty: all devices of the host."""
    memory_wait_seconds: float = 300.0
    """Maximum wait of a load for accelerator memory."""
    worker_hosts: tuple[str, ...] = ()
    """Other hosts that have a part of its models."""
    max_requests: int | None = None
    """Concurrent requests over all its models; None: as many as its slots."""
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)
    """Environment variables for wake recipes."""
    conceals_local_addresses: bool = False
    """Whether its reports leave this machine, so that the addresses of its own servers are redacted."""
