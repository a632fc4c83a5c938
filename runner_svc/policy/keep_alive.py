"""Decides how long idle models stay loaded. Durations are seconds; negative means unlimited."""

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from weft.kernel.requests.request_values import Operation

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


def keep_alive(
    wishes: Iterable[float | None],
    category: str = DEFAULT_CATEGORY,
    *,
    holds_devices: bool = False,
    pinned: bool = False,
) -> float | None:
    """Returns the idle time after which a model is put to sleep; None: never.

    `wishes`: of the last finished request, the explicit load and the configuration, each None if unset.
    """
    if pinned:
        return None
    for seconds in wishes:
        if seconds is not None:
            return None if seconds < 0 else seconds
    return CATEGORY_SECONDS[category] if holds_devices else None


def seconds_to_sleep(
    after_seconds: float | None, idle_seconds: float, *, busy: bool, stays_awake: bool
) -> float | None:
    """Returns when to decide again about a ready model's sleep; 0: it sleeps now; None: after the next event.

    `after_seconds`: the result of `keep_alive`. `stays_awake`: its runner is stopping.
    """
    if after_seconds is None or stays_awake:
        return None
    if busy:
        # The end of a request is an event, so the delay only matters for long requests.
        return after_seconds or None
    return max(0.0, after_seconds - idle_seconds)
