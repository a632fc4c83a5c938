"""How one load of a model is to be, as values."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from runner_svc.policy.load_parameters import LoadValue


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """The options of one life of a backend; the default is as configured.

    Two plans are equal when the same backend serves both.
    """

    parameters: Mapping[str, LoadValue] = field(default_factory=dict)
    """Checked values of the backend's load parameters."""
    quantization: str = ""
    """One of the configured variants; empty: the file that is configured."""


AS_CONFIGURED = LoadPlan()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSpec:
    """What a caller wants of a load, and for how long."""

    plan: LoadPlan = AS_CONFIGURED
    memory_budget_bytes: int = 0
    """The most accelerator memory that it may take; 0: as much as it needs."""
    keep_alive_seconds: float = -1.0
    """How long it stays loaded after a request; negative: until it is unloaded."""
    pin: bool = False
    """Whether it is never evicted for another model."""


STAY_LOADED = LoadSpec()
