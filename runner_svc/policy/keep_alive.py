"""How long a model stays loaded when nobody asks anything of it. The text forms are read in `weft.kernel.units`.

Lengths are seconds; a negative one is for ever.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

DEFAULT_CATEGORY = "text"
CATEGORY_SECONDS: Mapping[str, float] = MappingProxyType({"text": 300.0, "image": 900.0, "vision": 60.0})
"""Kept where a model holds accelerator memory and nothing else is said: image pipelines are slow to load, vision models
small and quick."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepAliveWishes:
    """What was said about it, the most specific first; None: nothing."""

    request_seconds: float | None = None
    """By the last request that ended."""
    load_seconds: float | None = None
    """By whoever loaded it."""
    model_seconds: float | None = None
    """By its configuration."""
    category: str = DEFAULT_CATEGORY
    holds_devices: bool = False
    """Whether it holds memory of accelerators that others may need."""
    pinned: bool = False


def keep_alive(wishes: KeepAliveWishes) -> float | None:
    """Idle seconds after which it goes to sleep; None: never by itself."""
    if wishes.pinned:
        return None
    for seconds in (wishes.request_seconds, wishes.load_seconds, wishes.model_seconds):
        if seconds is not None:
            return None if seconds < 0 else seconds
    return CATEGORY_SECONDS[wishes.category] if wishes.holds_devices else None
