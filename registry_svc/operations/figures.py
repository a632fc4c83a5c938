"""Figures that runners tell, made into what can be added up and passed on: a runner may be wrong, or lie.

They are believed within bounds and brought to the nearest one beyond; an operation is not failed by a figure.
"""

from collections.abc import Iterable

from google.protobuf import duration_pb2

MAX_AMOUNT = 2**50
"""Of bytes, tokens and entries, also of all together: 1 PiB, more than any mesh holds."""
MAX_SECONDS = 31_622_400.0
"""366 days: nothing takes longer."""


def amount(told: int) -> int:
    """A number of bytes, tokens or entries: 0 to MAX_AMOUNT."""
    return min(max(told, 0), MAX_AMOUNT)


def amount_of_all(told: Iterable[int]) -> int:
    """The sum of amounts, which is an amount."""
    return amount(sum(map(amount, told)))


def seconds_of(told: duration_pb2.Duration) -> float:
    """A length of time: 0 to MAX_SECONDS."""
    return min(max(told.seconds + told.nanos / 1e9, 0.0), MAX_SECONDS)
