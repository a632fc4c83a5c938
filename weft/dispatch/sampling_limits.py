"""What sampling parameters may be, in a request and as an agent's defaults: as common/v1/sampling.proto says."""

import math

from weft.api.common.v1 import sampling_pb2
from weft.kernel.errors import invalid_field

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1_024
MAX_LOGIT_BIAS_ENTRIES = 300
MAX_LOGIT_BIAS = 100

_RANGES: dict[str, tuple[float, float]] = {
    "max_tokens": (1, 2**31 - 1),
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (0, 2**31 - 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repeat_penalty": (0, 2),
}


def check_sampling(sampling: sampling_pb2.SamplingParams, field: str) -> None:
    """Raises INVALID_ARGUMENT naming the parameter below `field`."""
    for name, (low, high) in _RANGES.items():
        if sampling.HasField(name):  # type: ignore[arg-type]  # the names are fields, see _RANGES
            _check_number(f"{field}.{name}", getattr(sampling, name), low, high)
    _check_count(f"{field}.stop", len(sampling.stop), MAX_STOP_STRINGS)
    for index, stop in enumerate(sampling.stop):
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            raise invalid_field(f"{field}.stop[{index}]", f"must be 1 to {MAX_STOP_CHARS} characters")
    _check_count(f"{field}.logit_bias", len(sampling.logit_bias), MAX_LOGIT_BIAS_ENTRIES)
    for token, bias in sampling.logit_bias.items():
        _check_number(f"{field}.logit_bias[{token}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)


def _check_number(field: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise invalid_field(field, f"must be {low:g} to {high:g}")


def _check_count(field: str, count: int, most: int) -> None:
    if count > most:
        raise invalid_field(field, f"must have at most {most} entries, has {count}")
