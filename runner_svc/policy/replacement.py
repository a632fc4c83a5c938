"""Decides whether a changed model is loaded beside its old instance or after it, by required and free memory. Pure."""

from weft.kernel.values.units import size_words


def must_drain_first(*, is_loaded: bool, needed_bytes: int | None, free_bytes: int | None) -> bool:
    """Whether a new instance that needs this memory loads only after the last request of the old one.

    Otherwise it loads beside it: both need memory meanwhile. `free_bytes` is the memory available to another model on
    the new one's devices without eviction. Unknown values (None) count as sufficient.
    """
    return is_loaded and needed_bytes is not None and free_bytes is not None and needed_bytes > free_bytes


def replacement_words(model: str, *, drains_first: bool, needed_bytes: int | None, free_bytes: int | None) -> str:
    """Returns a sentence for people about the replacement of a model."""
    if not drains_first:
        return f"{model} is loaded beside the old one, which ends with its last request"
    needed, free = (size_words(each or 0) for each in (needed_bytes, free_bytes))
    return f"{model} is loaded once the old one has ended with its last request: it needs {needed}, and {free} are free"
