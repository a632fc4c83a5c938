"""Load parameters, and the options of a model's loads."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from weft.kernel.models.load_parameters import LoadParameter, LoadValue, load_parameter, value_message

MIN_CONTEXT_TOKENS = 16
MAX_CONTEXT_TOKENS = 16_777_216


def context_parameter(configured: int, trained: int) -> LoadParameter:
    """Returns the parameter for the context of one slot; its maximum is the larger of trained and configured."""
    return load_parameter(
        "context_tokens",
        "Context of one slot, prompt and answer together.",
        integer=True,
        minimum=MIN_CONTEXT_TOKENS,
        maximum=max(trained, configured) if trained else MAX_CONTEXT_TOKENS,
        default=configured,
    )


def whole_parameter(
    name: str, description: str, minimum: int, maximum: int, default: LoadValue | None = None
) -> LoadParameter:
    """Returns an integer load parameter."""
    return load_parameter(name, description, integer=True, minimum=minimum, maximum=maximum, default=default)


def word_parameter(name: str, description: str, words: Sequence[str]) -> LoadParameter:
    """Returns a load parameter with a list of allowed values."""
    return load_parameter(name, description, words=words)


def with_defaults(parameters: Iterable[LoadParameter], configured: Mapping[str, LoadValue]) -> Iterator[LoadParameter]:
    """Yields load parameters with the values that a model's settings have for them."""
    for parameter in parameters:
        if parameter.name not in configured:
            yield parameter
            continue
        given = LoadParameter()
        given.CopyFrom(parameter)
        given.default.CopyFrom(value_message(configured[parameter.name]))
        yield given


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """Options of one backend start; the default is as configured.

    Two plans are equal if the same backend process can serve both.
    """

    parameters: Mapping[str, LoadValue] = field(default_factory=dict)
    quantization: str = ""
    """A configured quantization; empty: the configured file."""


AS_CONFIGURED = LoadPlan()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSpec:
    """An explicit load."""

    plan: LoadPlan = AS_CONFIGURED
    memory_budget_bytes: int = 0
    """Maximum accelerator memory; 0: no limit."""
    keep_alive_seconds: float = -1.0
    """Keep-alive after a request; negative: until it is unloaded."""
    pin: bool = False
    """Whether it is never evicted for another model."""


STAY_LOADED = LoadSpec()
