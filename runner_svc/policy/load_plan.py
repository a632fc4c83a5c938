"""The plan of one load of a model, and the specification of an explicit load."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from runner_svc.policy.load_parameters import LoadValue


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """The options of one start of a backend; the default is as configured.

    Two plans are equal when the same backend serves both.
    """

    parameters: Mapping[str, LoadValue] = field(default_factory=dict)
    """Checked values of the backend's load parameters."""
    quantization: str = ""
    """One of the configured quantizations; empty: the configured file."""


AS_CONFIGURED = LoadPlan()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSpec:
    """The specification of an explicit load: plan, memory budget, keep-alive."""

    plan: LoadPlan = AS_CONFIGURED
    memory_budget_bytes: int = 0
    """Maximum accelerator memory; 0: no limit."""
    keep_alive_seconds: float = -1.0
    """Keep-alive after a request; negative: until it is unloaded."""
    pin: bool = False
    """Whether it is never evicted for another model."""


STAY_LOADED = LoadSpec()
