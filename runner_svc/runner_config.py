"""Configuration of a runner: its models, agents and limits, built by weft_app from weft.yaml."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from runner_svc.added_models import ModelAdder
from runner_svc.followed_servers import FollowedServer, ServerOf
from runner_svc.instance.instance_settings import ServedModel
from runner_svc.memory.lease_manager import Observer
from runner_svc.model_store.peers import SharedModels
from runner_svc.runner_settings import DEFAULT_DEVICE_SAMPLE_SECONDS
from runner_svc.runtimes.table import DEFAULT_RUNTIME
from runner_svc.supervise.leftovers import Leftovers
from runner_svc.tools.port import ToolSettings
from weft.api.registry.v1 import agent_pb2
from weft.kernel.channels.tls_channel import ChannelSecurity


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """Configuration of one runner process."""

    name: str
    """Unique in the mesh."""
    runtime: str = DEFAULT_RUNTIME
    host: str
    address: str
    """Its gRPC target for others, such as "unix:/path/runner.sock"."""
    registry_address: str
    security: ChannelSecurity = field(default_factory=ChannelSecurity)
    """Credentials and trusted CAs for calls to other machines."""
    session_file: Path
    """Stores the session id across restarts."""
    leftovers: Leftovers | None = None
    """Orphaned processes of an earlier incarnation, killed before the first backend starts. None: not tracked."""
    models: tuple[ServedModel, ...]
    agents: tuple[agent_pb2.AgentManifest, ...] = ()
    """The published agents. Read-only."""
    requires_all: bool = False
    """Whether the mesh refuses the runner instead of leaving out models or agents that it cannot publish."""
    reserved_names: frozenset[str] = frozenset()
    """Names of the configuration's other resources, which its models from servers must not take."""
    tools: tuple[ToolSettings, ...] = ()
    """Sources of the tools that the runner runs for models, see ToolRunner.settings."""
    followed: tuple[FollowedServer, ...] = ()
    """Servers whose listed models are all served."""
    adder: ModelAdder | None = None
    """Creates models from sources; None: only configured models are served."""
    shared_models: SharedModels | None = None
    """The pulled models that other runners may copy; None: none."""
    server_adder: ServerOf | None = None
    """Creates servers that are attached at runtime; None: none can be attached."""
    observer: Observer | None = None
    """Observer of this host's accelerators; None: devices are not observed, and no memory is leased."""
    device_sample_seconds: float = DEFAULT_DEVICE_SAMPLE_SECONDS
    """Interval of accelerator samples while engines work on requests."""
    device_indexes: tuple[int, ...] = ()
    """Devices that its models may use; empty: all devices of the host."""
    memory_wait_seconds: float = 300.0
    """Maximum wait of a load for accelerator memory."""
    worker_hosts: tuple[str, ...] = ()
    """Other hosts that run parts of its models."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels by which conditions of routes choose runners."""
    max_requests: int | None = None
    """Maximum concurrent requests over all its models; None: limited only by its slots."""
    stored_prompts_mb: int = 0
    """Maximum size on disk, in MiB, of the prompts of engines that ended; 0: none are stored."""
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)
    """Environment variables for wake recipes."""
    conceals_local_addresses: bool = False
    """Whether its reports leave this machine, so that local server addresses are redacted."""
    is_joined: bool = False
    """Whether it is on a joined machine. It then runs only tools of its own agents, and fetches no stored prompts."""
