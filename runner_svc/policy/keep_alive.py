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
class KeepAliveSettings:
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


def keep_alive(wishes: KeepAliveSettings) -> float | None:
    """Idle seconds after which it goes to sleep; None: never by itself."""
    if wishes.pinned:
        return None
    for seconds in (wishes.request_seconds, wishes.load_seconds, wishes.model_seconds):
        if seconds is not None:
            return None if seconds < 0 else seconds
    return CATEGORY_SECONDS[wishes.category] if wishes.holds_devices else None


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleState:
    """What is known about a model that takes requests. Times are seconds on any monotonic clock."""

    now: float
    idle_since: float
    """When its last request ended, or it became ready, or it last refused to sleep."""
    busy: bool
    """Whether a request holds a slot."""
    stays_awake: bool
    """Whether it was loaded to stay, or its runner is stopping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepDecision:
    """Whether to go to sleep now, and when to look again."""

    sleep: bool
    look_again_seconds: float | None = None
    """None: not before something else happens."""


def decide_sleep(signs: IdleState, after_seconds: float | None) -> SleepDecision:
    """The decision for a model that sleeps after `after_seconds` without a request; None: never by itself."""
    if after_seconds is None or signs.stays_awake:
        return SleepDecision(sleep=False)
    if signs.busy:
        # Its end is told; looking again is for those that are held for long, and not all the time.
        return SleepDecision(sleep=False, look_again_seconds=after_seconds or None)
    left = signs.idle_since + after_seconds - signs.now
    return SleepDecision(sleep=True) if left <= 0 else SleepDecision(sleep=False, look_again_seconds=left)
