"""Ports of the runner API: the runner and its queue. `weft_app.compose` connects them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from gateway.auth.authentication import KeyRingSource
from gateway.operations import OperationsPort
from weft.api.common.v1 import error_reason_pb2
from weft.api.registry.v1.model_pb2 import MODEL_SKILL_AUDIO, MODEL_SKILL_TOOLS
from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.api.runner.v1 import runner_service_pb2
from weft.dispatch.call import RequestDispatcher
from weft.dispatch.fleet import FleetSource
from weft.gpu.snapshot import DeviceSnapshot
from weft.kernel.health import AlwaysHealthy, HealthSource
from weft.kernel.tracing import NO_TRACING, Tracing


class RunnerStage(Enum):
    """Life-cycle stage of the runner process."""

    STARTING = auto()
    SERVING = auto()
    STOPPING = auto()


class ModelStage(Enum):
    """Life-cycle stage of a model, as the API publishes it."""

    AVAILABLE = auto()
    LOADING = auto()
    LOADED = auto()
    FAILED = auto()
    """It crashed too often in a row, or cannot be started."""


_STAGES = {
    InstanceState.PHASE_READY: ModelStage.LOADED,
    # The runner finishes running requests.
    InstanceState.PHASE_DRAINING: ModelStage.LOADED,
    InstanceState.PHASE_LOADING: ModelStage.LOADING,
    InstanceState.PHASE_CRASH_LOOP: ModelStage.FAILED,
    InstanceState.PHASE_FAILED: ModelStage.FAILED,
}
_APART = {
    runner_service_pb2.CACHE_ISOLATION_SLOTS: True,
    runner_service_pb2.CACHE_ISOLATION_WHOLE: True,
    runner_service_pb2.CACHE_ISOLATION_SALT: True,
    runner_service_pb2.CACHE_ISOLATION_NONE: False,
}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """One model of the runner, as the runner describes it. The messages must not be modified."""

    state: InstanceState
    description: runner_service_pb2.InstanceDescription
    takes_chats: bool = False
    called: frozenset[str] = frozenset()
    """What else it is called by: its source, with and without `hf:`, or its path, as configured."""

    @property
    def name(self) -> str:
        """The model's name in the mesh."""
        return self.state.model

    @property
    def takes_audio(self) -> bool:
        """Whether it is known to take audio."""
        return MODEL_SKILL_AUDIO in self.state.abilities.skills

    @property
    def calls_tools(self) -> bool:
        """Whether it takes chats, and is not known to lack tools."""
        return self.takes_chats and MODEL_SKILL_TOOLS not in self.state.abilities.lacking

    @property
    def stage(self) -> ModelStage:
        """Where it is in its life."""
        return _STAGES.get(self.state.phase, ModelStage.AVAILABLE)

    @property
    def loaded_at(self) -> int | None:
        """Unix time of the last load, while it is loaded; None: unknown."""
        if self.stage is not ModelStage.LOADED or not self.description.HasField("last_ready_time"):
            return None
        return self.description.last_ready_time.seconds

    @property
    def memory_bytes(self) -> int | None:
        """Accelerator memory: measured, or that of its lease; None: unknown."""
        memory = self.state.memory
        return memory.measured_bytes if memory.HasField("measured_bytes") else memory.leased_bytes or None

    @property
    def tenants_apart(self) -> bool | None:
        """Whether the prefixes of different tenants are isolated; None: unknown."""
        return _APART.get(self.description.cache_isolation)

    @property
    def out_of_memory(self) -> bool:
        """Whether the last fault was a lack of memory and the engine has not started again since."""
        if self.stage is ModelStage.LOADED or not self.description.restarts:
            return False
        last = self.description.restarts[-1]
        return last.reason == error_reason_pb2.ERROR_REASON_OUT_OF_MEMORY and not last.HasField("recovery")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerFacts:
    """The runner's state at one moment."""

    name: str
    kind: str
    """Runtime and version, such as `llama_server-weft-0.1.0`."""
    stage: RunnerStage
    models: tuple[ModelFacts, ...] = ()
    adds_models: bool = False
    """Whether it serves models by their source that its configuration does not name."""
    device_use: "Mapping[int, DeviceUse]" = field(default_factory=dict)
    """The use of devices by their index, as far as they are sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """The use of one device, as its runner samples it."""

    mean_utilization: float | None = None
    """Share of the last minute in which it computed; None: unknown."""
    bytes_by_model: Mapping[str, int | None] = field(default_factory=dict)
    """Memory of it that each model holds; None: unknown."""
    foreign_bytes: int | None = None
    """Memory of it that processes of others hold; None: unknown."""


class RunnerPort(Protocol):
    """The runner of this process."""

    def facts(self) -> RunnerFacts:
        """Returns the current facts. Cheap: called with every health check."""
        ...

    async def devices(self) -> tuple[DeviceSnapshot, ...] | None:
        """Returns the accelerators that it may use, by index; None: unknown."""
        ...


class QueueView(Protocol):
    """The queue in front of the runner; see `router_svc.service.RouterService`."""

    @property
    def load(self) -> tuple[int, int]:
        """Number of waiting and of running requests."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerApiPorts:
    """Services that the API of one runner calls. Dispatcher, fleet and queue know this runner alone."""

    runner: RunnerPort
    dispatcher: RequestDispatcher
    fleet: FleetSource
    queue: QueueView
    operations: OperationsPort
    keys: KeyRingSource | None = None
    """The valid API keys; None: callers need none."""
    health: HealthSource = AlwaysHealthy()  # noqa: RUF009 - it has no state
    """The health of the process."""
    tracing: Tracing = NO_TRACING
    """Where the spans of requests go."""
