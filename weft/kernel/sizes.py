"""Amounts of memory as people write and read them."""

import re
from collections.abc import Mapping

from weft.kernel.errors import invalid_field

MAX_SIZE_CHARS = 32
MAX_SIZE_BYTES = 2**62
MIN_PLAIN_BYTES = 1024**2
"""The least number without a unit: who writes 300 means something larger than bytes."""

_UNITS: Mapping[str, int] = {
    "": 1,
    "b": 1,
    "k": 1024,
    "kib": 1024,
    "kb": 1000,
    "m": 1024**2,
    "mib": 1024**2,
    "mb": 1000**2,
    "g": 1024**3,
    "gib": 1024**3,
    "gb": 1000**3,
    "t": 1024**4,
    "tib": 1024**4,
    "tb": 1000**4,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.ASCII | re.IGNORECASE)


def parse_size(text: str, field: str) -> int:
    """Bytes of "8GiB", "8G" (the same), "8GB" (8,000,000,000), "512MiB" or "8589934592".

    Raises INVALID_ARGUMENT naming `field`, for a number without a unit below MIN_PLAIN_BYTES too.
    """
    found = _SIZE.fullmatch(text.strip()) if len(text) <= MAX_SIZE_CHARS else None
    unit = None if found is None else _UNITS.get(found[2].lower())
    if found is None or unit is None:
        raise invalid_field(field, "must be an amount of memory such as 8GiB, 512MiB or 8GB")
    if not found[2] and float(found[1]) < MIN_PLAIN_BYTES:
        raise invalid_field(field, f"{found[1]} has no unit, which means bytes: write {found[1]}MiB or {found[1]}GiB")
    amount = int(float(found[1]) * unit) if "." in found[1] else int(found[1]) * unit
    if not 0 < amount <= MAX_SIZE_BYTES:
        raise invalid_field(field, "must be more than 0 bytes and at most 4 EiB")
    return amount


def size_words(amount_bytes: int) -> str:
    """An amount for people: "5.1 GiB", "512 MiB", "12 KiB", "7 bytes"."""
    for unit, size in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if amount_bytes >= size:
            amount = amount_bytes / size
            return f"{amount:.0f} {unit}" if amount >= 100 or amount == int(amount) else f"{amount:.1f} {unit}"
    return f"{amount_bytes} bytes"
