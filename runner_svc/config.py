"""How a runner is set up. The host builds these from the configuration file; tests build them by hand."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from runner_svc.backend.port import Backend
from runner_svc.chat.settings import ChatSettings
from runner_svc.instance.settings import HibernationSettings
from runner_svc.memory.lease_manager import Observer
from runner_svc.memory.port import MemoryForecast, NoForecast
from runner_svc.policy.restart import RestartLimits
from runner_svc.policy.timeouts import TimeoutProfile
from runner_svc.supervise.leftovers import Leftovers
from runner_svc.tools.config import ToolSourceConfig
from weft.api.common.v1 import agent_behaviour_pb2, sampling_pb2
from weft.kernel.request import TEXT_OPERATIONS, Operation, Skill
from weft.kernel.tls_channel import ChannelSecurity
from weft.wake.recipes import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One model and how its backend is made."""

    name: str
    """Unique in the mesh."""
    pool: str = ""
    """Models of one pool answer for each other; empty: a pool of its own."""
    make_backend: Callable[[], Backend]
    operations: frozenset[Operation] = TEXT_OPERATIONS
    slots: int = 4
    context_tokens: int = 0
    model_path: Path | None = None
    """The file whose digest goes on receipts."""
    remote: bool = False
    """Serving it sends bytes off the premises."""
    timeouts: TimeoutProfile = field(default_factory=TimeoutProfile)
    chat: ChatSettings = field(default_factory=ChatSettings)
    hibernation: HibernationSettings = field(default_factory=HibernationSettings)
    quantizations: Mapping[str, Path] = field(default_factory=dict)
    """Further files of the same model that may be loaded, by quantization."""
    vision_input: bool = False
    """Whether it takes images."""
    skills: frozenset[Skill] = frozenset()
    """What the mesh is told that it can do beyond text; empty: unknown."""
    target_inflight: int | None = None
    """Requests that it works on at once; None: as many as its slots."""
    forecast: MemoryForecast = field(default_factory=NoForecast)
    """What loads of it take."""
    wake_by_mesh: Recipe | None = None
    """What a router does to wake the host; the registry is told. What the runner does stays here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedAgent:
    """An agent that is published with the models. Either `model` or `pool` is set."""

    name: str
    """Unique in the mesh."""
    model: str = ""
    pool: str = ""
    description: str = ""
    system_prompt: str = ""
    default_params: sampling_pb2.SamplingParams = field(default_factory=sampling_pb2.SamplingParams)
    """Only ever read."""
    behaviour: agent_behaviour_pb2.AgentBehaviour | None = None
    """What the mesh does around its chats; None: nothing. Only ever read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """One runner process."""

    name: str
    """Unique in the mesh."""
    runtime: str = "llama_server"
    host: str
    address: str
    """Where others reach it, as a gRPC target such as "unix:/path/runner.sock"."""
    registry_address: str
    security: ChannelSecurity = field(default_factory=ChannelSecurity)
    """What is shown and trusted in calls that leave this machine."""
    session_file: Path
    """Keeps the session id across restarts."""
    leftovers: Leftovers | None = None
    """What an earlier life left running; swept before the first backend starts. None: nothing is remembered."""
    models: tuple[ServedModel, ...]
    restart: RestartLimits = field(default_factory=RestartLimits)
    agents: tuple[PublishedAgent, ...] = ()
    tools: tuple[ToolSourceConfig, ...] = ()
    """Sources of tools that the runner runs for models."""
    observer: Observer | None = None
    """Who looks at this host's accelerators; None: nobody does, and no memory is booked."""
    device_indexes: tuple[int, ...] = ()
    """Accelerators that its models may use; empty: all of the host."""
    memory_wait_seconds: float = 300.0
    """Longest wait of a load for accelerator memory."""
    max_requests: int | None = None
    """Requests it works on at once over all its models; None: as many as its slots."""
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)
    """What recipes see of it."""
    conceals_local_addresses: bool = False
    """Whether what it says of itself leaves this machine, and must not name where its own servers listen."""
