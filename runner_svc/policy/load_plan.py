"""The plan of one load of a model, common load parameters, and an explicit load."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weft.kernel.load_parameters import LoadParameter, LoadValue

MIN_CONTEXT_TOKENS = 16
MAX_CONTEXT_TOKENS = 16_777_216


def context_parameter(configured: int, trained: int) -> LoadParameter:
    """Returns the parameter for the context of one slot; its maximum: the larger of trained and configured."""
    return LoadParameter(
        name="context_tokens",
        description="Context of one slot, prompt and answer together.",
        integer=True,
        minimum=MIN_CONTEXT_TOKENS,
        maximum=max(trained, configured) if trained else MAX_CONTEXT_TOKENS,
        default=configured,
    )


def whole_parameter(
    name: str, description: str, minimum: int, maximum: int, default: LoadValue | None = None
) -> LoadParameter:
    """Returns a load parameter that is a whole number."""
    return LoadParameter(
        name=name, description=description, integer=True, minimum=minimum, maximum=maximum, default=default
    )


def word_parameter(name: str, description: str, words: Sequence[str]) -> LoadParameter:
    """Returns a load parameter with one of a list of values."""
    return LoadParameter(name=name, description=description, words=tuple(words))


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
