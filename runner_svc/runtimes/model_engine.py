"""What a runtime is given to build the engine of one model, and what it returns."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from runner_svc.backend.engine_process import EnginePorts
from runner_svc.backend.port import Backend
from runner_svc.memory.estimate import MemoryEstimator
from runner_svc.memory.port import MemoryForecast, NoForecast
from runner_svc.policy.timeouts import TimeoutProfile
from runner_svc.supervise.leftovers import Leftovers
from runner_svc.supervise.process import StopGraces
from weft.kernel.errors import FieldError, invalid_field
from weft.kernel.request import TEXT_OPERATIONS, Operation, Skill


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContext:
    """What the models of one runner have in common, and the place of one of them in the configuration."""

    where: str
    """Path of the model in the configuration, such as "runners.box.models.qwen"; errors begin with it."""
    command: tuple[str, ...] | None = None
    """The engine's program and its first arguments; None: the runtime's own."""
    timeouts: TimeoutProfile = field(default_factory=TimeoutProfile)
    graces: StopGraces = field(default_factory=StopGraces)
    load_stall_seconds: float = 300.0
    probe_interval_seconds: float = 5.0
    probe_failures: int = 3
    leftovers: Leftovers | None = None
    """Remembers the processes of engines for the runner's next start; None: they are not remembered."""
    ports: EnginePorts | None = None
    """Those that engines may listen on; None: any free one."""
    estimator: MemoryEstimator = field(default_factory=MemoryEstimator)
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)
    """Where keys are."""

    def refuse(self, setting: str, message: str) -> FieldError:
        """Returns the INVALID_ARGUMENT for a setting of this model."""
        return invalid_field(f"{self.where}.{setting}", message)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEngine:
    """How one configured model is served, and what is known of it before it loads."""

    make_backend: Callable[[], Backend]
    operations: frozenset[Operation] = TEXT_OPERATIONS
    slots: int
    """Requests that it works on at once."""
    context_tokens: int = 0
    """0: unknown."""
    model_path: Path | None = None
    """The file whose digest goes on receipts."""
    quantizations: Mapping[str, Path] = field(default_factory=dict)
    """Further files of the same model that may be loaded, by quantization."""
    forecast: MemoryForecast = field(default_factory=NoForecast)
    """What loads of it take."""
    remote: bool = False
    """Serving it sends bytes off the premises."""
    timeouts: TimeoutProfile = field(default_factory=TimeoutProfile)
    skills: frozenset[Skill] = frozenset()
    """What it can do beyond text, where the runtime can tell; empty: unknown."""
    requests_fail_alone: bool = False
    """A request that cannot reach the server says nothing about the others, nor whether the server is there."""
