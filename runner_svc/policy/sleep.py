"""When an idle model goes to sleep."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleSigns:
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


def decide_sleep(signs: IdleSigns, after_seconds: float | None) -> SleepDecision:
    """The decision for a model that sleeps after `after_seconds` without a request; None: never by itself."""
    if after_seconds is None or signs.stays_awake:
        return SleepDecision(sleep=False)
    if signs.busy:
        # Its end is told; looking again is for those that are held for long, and not all the time.
        return SleepDecision(sleep=False, look_again_seconds=after_seconds or None)
    left = signs.idle_since + after_seconds - signs.now
    return SleepDecision(sleep=True) if left <= 0 else SleepDecision(sleep=False, look_again_seconds=left)
