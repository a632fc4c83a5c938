"""Lengths of time as people write them."""

import math
import re
from collections.abc import Mapping

from weft.kernel.errors import FieldError, invalid_field

MAX_DURATION_SECONDS = 366 * 86_400.0
"""A year. Whoever wants longer wants for ever, and says -1."""
FOR_EVER = -1.0
"""What every negative length is read as."""
MAX_DURATION_CHARS = 32

_UNITS: Mapping[str, float] = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
_PART = r"(\d+(?:\.\d+)?)(ms|s|m|h|d)"
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?", re.ASCII)
_LENGTH = re.compile(rf"-?(?:{_PART})+", re.ASCII)
_PARTS = re.compile(_PART, re.ASCII)


def keep_alive_seconds(value: object, field: str) -> float:
    """How long a model stays loaded, in seconds: 300, "300", "5m", "1h30m", 0; -1 or any negative length: FOR_EVER.

    Raises INVALID_ARGUMENT naming `field`, also above a year.
    """
    seconds = _seconds(value)
    if seconds is None or math.isnan(seconds):
        raise _malformed(field)
    if seconds < 0:
        return FOR_EVER
    if seconds > MAX_DURATION_SECONDS:
        raise invalid_field(field, f"must be at most {MAX_DURATION_SECONDS:.0f} seconds (366 days); -1 is for ever")
    return seconds + 0.0  # without the sign of a negative zero


def _seconds(value: object) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        # An integer of JSON may have any number of digits; beyond the bound its exact value says nothing more.
        return float(max(-1, min(value, int(MAX_DURATION_SECONDS) + 1)))
    if isinstance(value, float):
        return value
    return _written(value) if isinstance(value, str) and len(value) <= MAX_DURATION_CHARS else None


def _written(text: str) -> float | None:
    if _NUMBER.fullmatch(text):
        return float(text)
    if not _LENGTH.fullmatch(text):
        return None
    length = sum(float(amount) * _UNITS[unit] for amount, unit in _PARTS.findall(text))
    return -length if text.startswith("-") else length


def _malformed(field: str) -> FieldError:
    return invalid_field(
        field, 'must be seconds such as 300, a length such as "90s", "5m" or "1h30m", 0 (not at all) or -1 (for ever)'
    )
