"""Decides how long idle models stay loaded. Durations are seconds; negative means unlimited."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from weft.kernel.request import Operation

DEFAULT_CATEGORY = "text"
CATEGORY_SECONDS: Mapping[str, float] = MappingProxyType(
    {"text": 300.0, "image": 900.0, "vision": 60.0, "audio": 300.0}
)
"""Default keep-alive of models that hold accelerator memory: image pipelines load slowly, vision models are small and
load fast, speech models are used like text models."""
_AUDIO = frozenset({Operation.TRANSCRIPTION, Operation.SPEECH})


def category_of(operations: Collection[Operation]) -> str:
    """Returns the default category of a model, from its operations."""
    if Operation.IMAGE in operations:
        return "image"
    return "audio" if operations and _AUDIO.issuperset(operations) else DEFAULT_CATEGORY


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepAliveSettings:
    """Keep-alive settings of a model, most specific first; None: unset."""

    request_seconds: float | None = None
    """Of the last finished request."""
    load_seconds: float | None = None
    """Of the explicit load."""
    model_seconds: float | None = None
    """Of the configuration."""
    category: str = DEFAULT_CATEGORY
    holds_devices: bool = False
    pinned: bool = False


def keep_alive(settings: KeepAliveSettings) -> float | None:
    """Returns the idle time after which it is put to sleep; None: never."""
    if settings.pinned:
        return None
    for seconds in (settings.request_seconds, settings.load_seconds, settings.model_seconds):
        if seconds is not None:
            return None if seconds < 0 else seconds
    return CATEGORY_SECONDS[settings.category] if settings.holds_devices else None


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleState:
    """The state of a ready model. Times are monotonic seconds."""

    now: float
    idle_since: float
    """When its last request ended, it became ready, or its last sleep attempt failed."""
    busy: bool
    """Whether a request holds a slot."""
    stays_awake: bool
    """Whether it must stay loaded because its runner is stopping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepDecision:
    """Whether to put the model to sleep now, and when to decide again."""

    sleep: bool
    look_again_seconds: float | None = None
    """None: after the next event."""


def decide_sleep(signs: IdleState, after_seconds: float | None) -> SleepDecision:
    """Decides for a model that sleeps after `after_seconds` without a request; None: never."""
    if after_seconds is None or signs.stays_awake:
        return SleepDecision(sleep=False)
    if signs.busy:
        # The end of a request is an event, so the delay only matters for long requests.
        return SleepDecision(sleep=False, look_again_seconds=after_seconds or None)
    left = signs.idle_since + after_seconds - signs.now
    return SleepDecision(sleep=True) if left <= 0 else SleepDecision(sleep=False, look_again_seconds=left)
