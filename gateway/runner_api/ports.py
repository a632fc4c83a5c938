"""Ports of the runner API: the runner and its queue. `weft_app.compose` connects them."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from gateway.auth.authentication import KeyRingSource
from gateway.operations import OperationsPort
from weft.dispatch.call import RequestDispatcher
from weft.dispatch.fleet import FleetSource


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCounts:
    """Prefix cache counts of a model since the runner started, as its engine reports them."""

    hits: int = 0
    misses: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """One model of the runner. None means unknown."""

    name: str
    stage: ModelStage
    quantization: str | None = None
    context_tokens: int | None = None
    """Context of one slot."""
    loaded_at: int | None = None
    """Unix time."""
    memory_bytes: int | None = None
    """Accelerator memory: measured, or that of its lease."""
    load_progress: float | None = None
    load_eta_seconds: float | None = None
    slots_used: int = 0
    takes_chats: bool = False
    takes_images: bool = False
    tenants_apart: bool | None = None
    """Whether the prefixes of different tenants are isolated."""
    out_of_memory: bool = False
    """Whether it failed because accelerator memory ran out."""
    cache: CacheCounts = CacheCounts()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerFacts:
    """The runner's state at one moment."""

    name: str
    kind: str
    """Runtime and version, such as `llama_server-weft-0.1.0`."""
    stage: RunnerStage
    models: tuple[ModelFacts, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """One accelerator that the runner may use."""

    index: int
    total_bytes: int
    used_bytes: int | None = None
    """Used by any process; None: unknown."""
    utilization: float | None = None
    """Share of time, 0 to 1; None: unknown."""


class RunnerPort(Protocol):
    """The runner of this process."""

    def facts(self) -> RunnerFacts:
        """Returns the current facts. Cheap: called with every health check."""
        ...

    async def devices(self) -> tuple[DeviceFacts, ...] | None:
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
