"""Whether a changed model is loaded beside the old one, or after it: by what it needs and what memory is free. Pure."""

from enum import Enum

from weft.kernel.units import size_words


class ReplacementOrder(Enum):
    """The order in which one instance of a model replaces another one."""

    BESIDE = "beside"
    """The new one loads, takes the requests, and the old one ends with its last one: both are in memory for a while."""
    DRAIN_FIRST = "drain first"
    """The old one ends with its last request, then the new one loads; requests that come meanwhile wait for it."""


def replacement_order(*, is_loaded: bool, needed_bytes: int | None, free_bytes: int | None) -> ReplacementOrder:
    """Returns the order for an old instance that is in memory or not, and a new one with this need.

    `free_bytes` is what a further model can have where the new one computes, with nothing evicted. What is unknown
    (None) hinders nothing.
    """
    if not is_loaded or needed_bytes is None or free_bytes is None or needed_bytes <= free_bytes:
        return ReplacementOrder.BESIDE
    return ReplacementOrder.DRAIN_FIRST


def replacement_words(model: str, order: ReplacementOrder, needed_bytes: int | None, free_bytes: int | None) -> str:
    """Returns a sentence about the replacement of a model, for people."""
    if order is ReplacementOrder.BESIDE:
        return f"{model} is loaded beside the old one, which ends with its last request"
    needed, free = (size_words(each or 0) for each in (needed_bytes, free_bytes))
    return f"{model} is loaded once the old one has ended with its last request: it needs {needed}, and {free} are free"
