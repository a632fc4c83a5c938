"""Flags and load parameters shared by engines based on llama.cpp."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from runner_svc.backend.port import LoadOrder
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.load_parameters import LoadParameter, LoadValue, check_parameters

MEBIBYTE = 1024 * 1024


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


def values_of_flags(
    arguments: Sequence[str], names_by_flag: Mapping[str, str], parameters: Sequence[LoadParameter]
) -> dict[str, LoadValue]:
    """Parses load parameters from command-line flags, by name; invalid values are skipped."""
    known = {parameter.name: parameter for parameter in parameters}
    found: dict[str, LoadValue] = {}
    for flag, text in pairwise(arguments):
        name = names_by_flag.get(flag)
        value = None if name is None else _value_of(text, known[name])
        if name is not None and value is not None:
            found[name] = value
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
