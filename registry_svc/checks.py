"""Checks of single values that a caller may send. Each raises INVALID_ARGUMENT naming the field."""

import math
from collections.abc import Sequence

from weft.kernel.errors import invalid_field


def require_text(text: str, field: str, max_chars: int) -> str:
    """Return one line of at most `max_chars` printable characters."""
    if len(text) > max_chars or not text.isprintable():
        raise invalid_field(
            field, f"must be at most {max_chars} characters, without line breaks and control characters"
        )
    return text


def require_words(text: str, field: str, max_chars: int) -> str:
    """Return a text of at most `max_chars` characters, of any number of lines."""
    if len(text) > max_chars or "\0" in text:
        raise invalid_field(field, f"must be at most {max_chars} characters, none of them NUL")
    return text


def require_count(number: int, field: str) -> int:
    """Return a number that is not negative."""
    if number < 0:
        raise invalid_field(field, "must not be negative")
    return number


def require_range(number: float, field: str, low: float, high: float) -> float:
    """Return a number between two bounds; NaN is between none."""
    if not math.isfinite(number) or not low <= number <= high:
        raise invalid_field(field, f"must be {low:g} to {high:g}")
    return number


def require_at_most(items: Sequence[object], field: str, limit: int) -> None:
    """Refuse more than `limit` items."""
    if len(items) > limit:
        raise invalid_field(field, f"at most {limit}, has {len(items)}")


def require_unique(names: Sequence[str], field: str, member: str) -> None:
    """Refuse a name that appears twice."""
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen:
            raise invalid_field(f"{field}[{index}].{member}", "must not appear twice")
        seen.add(name)
