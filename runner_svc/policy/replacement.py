"""Decides whether a changed model is loaded beside its old instance or after it, by required and free memory. Pure."""

from enum import Enum

from weft.kernel.units import size_words


class ReplacementOrder(Enum):
    """How one instance of a model replaces another."""

    BESIDE = "beside"
    """The new one loads and takes new requests; the old one ends with its last request. Both need memory meanwhile."""
    DRAIN_FIRST = "drain first"
    """The old one ends with its last request, then the new one loads; new requests wait."""


def replacement_order(*, is_loaded: bool, needed_bytes: int | None, free_bytes: int | None) -> ReplacementOrder:
    """Returns the order for an old instance and a new one that needs this memory.

    `free_bytes` is the memory available to another model on the new one's devices without eviction. Unknown values
    (None) count as sufficient.
    """
    if not is_loaded or needed_bytes is None or free_bytes is None or needed_bytes <= free_bytes:
        return ReplacementOrder.BESIDE
    return ReplacementOrder.DRAIN_FIRST


def replacement_words(model: str, order: ReplacementOrder, needed_bytes: int | None, free_bytes: int | None) -> str:
    """Returns a sentence for people about the replacement of a model."""
    if order is ReplacementOrder.BESIDE:
        return f"{model} is loaded beside the old one, which ends with its last request"
    needed, free = (size_words(each or 0) for each in (needed_bytes, free_bytes))
    return f"{model} is loaded once the old one has ended with its last request: it needs {needed}, and {free} are free"
