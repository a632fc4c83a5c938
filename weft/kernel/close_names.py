"""Which names were perhaps meant by one that nothing has."""

from collections.abc import Iterable
from difflib import get_close_matches

MAX_CLOSE_NAMES = 3
_COMPARED_NAMES = 10_000
"""Names that one is compared with at most: comparing takes some microseconds each."""


def close_names(name: str, names: Iterable[str]) -> str:
    """Returns the question whether one of the names that are close was meant; empty where none is."""
    close = get_close_matches(name, sorted(names)[:_COMPARED_NAMES], n=MAX_CLOSE_NAMES)
    return f"did you mean {' or '.join(close)}?" if close else ""
