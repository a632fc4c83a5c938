"""Load parameters that the engines over llama.cpp share."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from runner_svc.policy.load_parameters import LoadParameter, LoadValue, check_parameters
from weft.kernel.errors import WeftError, invalid_field

MIN_CONTEXT_TOKENS = 16
MAX_CONTEXT_TOKENS = 16_777_216
PLAIN_CACHE_TYPES = frozenset({"f16", "bf16", "f32"})


def context_parameter(configured: int, trained: int) -> LoadParameter:
    """The context of one slot: at most what the model was made for, or what was configured where that is more."""
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
    """A whole number."""
    return LoadParameter(
        name=name, description=description, integer=True, minimum=minimum, maximum=maximum, default=default
    )


def word_parameter(name: str, description: str, words: Sequence[str]) -> LoadParameter:
    """One of some words."""
    return LoadParameter(name=name, description=description, words=tuple(words))


def check_cache_and_attention(parameters: Mapping[str, LoadValue], usual_attention: str, field: str) -> None:
    """Raise INVALID_ARGUMENT for quantized values without flash attention: llama.cpp gives up a load with both."""
    quantized = parameters.get("cache_type_v", "f16") not in PLAIN_CACHE_TYPES
    if quantized and parameters.get("flash_attention", usual_attention) == "off":
        raise invalid_field(f"{field}.cache_type_v", "must be f16, bf16 or f32 unless flash_attention is on")


def values_of_flags(
    arguments: Sequence[str], names_by_flag: Mapping[str, str], parameters: Sequence[LoadParameter]
) -> dict[str, LoadValue]:
    """What flags of a command line set, by the names of load parameters; values that cannot be are left out."""
    known = {parameter.name: parameter for parameter in parameters}
    found: dict[str, LoadValue] = {}
    for flag, text in pairwise(arguments):
        name = names_by_flag.get(flag)
        value = None if name is None else _value_of(text, known[name])
        if name is not None and value is not None:
            found[name] = value
    return found


def _value_of(text: str, parameter: LoadParameter) -> LoadValue | None:
    """A value as it is written on a command line; None where it cannot be one of the parameter."""
    value: LoadValue = text
    if not parameter.words:
        try:
            value = int(text) if parameter.integer else float(text)
        except ValueError:
            return None
    try:
        return check_parameters({parameter.name: value}, (parameter,))[parameter.name]
    except WeftError:
        return None
