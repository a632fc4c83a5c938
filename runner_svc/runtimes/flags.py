"""The command line of an engine's program: the flags of a model's settings and of load parameters."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from runner_svc.backend.devices import uses_no_device
from runner_svc.backend.port import LoadOrder
from runner_svc.policy.memory_estimate import MEBIBYTE
from runner_svc.runtimes.runtime_settings import Argument, ModelSettings
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.models.load_parameters import LoadParameter, LoadValue, check_parameters

LoadFlags = Sequence[tuple[LoadParameter, Sequence[str]]]
"""Load parameters with their flag and its other spellings."""


def flags_of(model: ModelSettings, chosen: Mapping[str, Any]) -> list[str]:
    """Returns the flags of a model's marked settings. Values in `chosen`, by setting, override configured ones."""
    return [
        word
        for setting, flag in marked_settings(type(model))
        for word in _words(flag, chosen.get(setting, getattr(model, setting)))
    ]


def marked_settings(kind: type[ModelSettings]) -> Sequence[tuple[str, str]]:
    """Returns the marked settings of a model class with their flags."""
    hints = get_type_hints(kind, include_extras=True)
    return tuple(
        (name, mark.name) for name, hint in hints.items() for mark in _marks(hint) if isinstance(mark, Argument)
    )


def _marks(hint: Any) -> Iterator[Any]:
    """Yields the annotations of a type, or of the members of a union."""
    if get_origin(hint) is Annotated:
        yield from hint.__metadata__
        return
    for member in get_args(hint):
        if get_origin(member) is Annotated:
            yield from member.__metadata__


def _words(flag: str, value: Any) -> list[str]:
    if value is None or value is False or value == ():
        return []
    if value is True:
        return [flag]
    return [flag, ",".join(map(_word, value)) if isinstance(value, tuple) else _word(value)]


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def load_arguments(order: LoadOrder, flags: LoadFlags) -> list[str]:
    """Returns the flags of a load: its parameters, and the split of the model over devices, as llama.cpp has them."""
    values = {**order.parameters, **({"gpu_layers": 0} if uses_no_device(order) else {})}
    known = [(flag, values[parameter.name]) for parameter, (flag, *_) in flags if parameter.name in values]
    arguments = [word for flag, value in known for word in (flag, _word(value))]
    split = tensor_split(order)
    return [*arguments, "--tensor-split", ",".join(map(str, split))] if split else arguments


def tensor_split(order: LoadOrder) -> list[int]:
    """Returns the part of the model for each visible device, in MiB; empty: no split.

    If devices are not hidden, the engine sees all of them, so those without a share get 0.
    """
    shares = order.shares or ()
    if len(shares) < 2:
        return []
    parts = {share.device_index: max(1, share.bytes // MEBIBYTE) for share in shares}
    if order.hides_devices:
        return [parts[share.device_index] for share in shares]
    return [parts.get(index, 0) for index in range(shares[-1].device_index + 1)]


PLAIN_CACHE_TYPES = frozenset({"f16", "bf16", "f32"})


def check_cache_and_attention(parameters: Mapping[str, LoadValue], usual_attention: str, field: str) -> None:
    """Raises INVALID_ARGUMENT for a quantized V cache without flash attention: llama.cpp aborts such a load."""
    quantized = parameters.get("cache_type_v", "f16") not in PLAIN_CACHE_TYPES
    if quantized and parameters.get("flash_attention", usual_attention) == "off":
        raise invalid_field(f"{field}.cache_type_v", "must be f16, bf16 or f32 unless flash_attention is on")


def configured_values(arguments: Sequence[str], flags: LoadFlags) -> dict[str, LoadValue]:
    """Parses load parameters from configured flags, by name; invalid values are skipped."""
    by_flag = {flag: parameter for parameter, spellings in flags for flag in spellings}
    found: dict[str, LoadValue] = {}
    for flag, text in pairwise(arguments):
        parameter = by_flag.get(flag)
        value = None if parameter is None else _value_of(text, parameter)
        if parameter is not None and value is not None:
            found[parameter.name] = value
    return found


def _value_of(text: str, parameter: LoadParameter) -> LoadValue | None:
    """Parses a value from a command line; None: it is invalid for the parameter."""
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
