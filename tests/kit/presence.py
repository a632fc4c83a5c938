"""A value that may be missing and must not be."""

from typing import TypeVar

T = TypeVar("T")


def present(value: T | None) -> T:
    """Returns the value, which is not None."""
    assert value is not None
    return value
