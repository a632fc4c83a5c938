"""When a publisher counts as lost, and when one of its tasks counts as stalled."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PresenceLimits:
    """Limits of silence, in seconds."""

    reconnect_seconds: float
    """Time without an event stream."""
    silence_seconds: float
    """Time without a request."""
    task_silence_seconds: float
    """Time of a task without a line of its result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """What is known of a publisher. Times are seconds on one clock."""

    last_request: float
    """When its last request arrived."""
    stream_lost: float | None
    """Since when it has no event stream; None: it has one."""


def loss_of(presence: Presence, limits: PresenceLimits, now: float) -> str:
    """Returns why a publisher is lost, in words; empty: it is there."""
    if presence.stream_lost is not None and now - presence.stream_lost >= limits.reconnect_seconds:
        return f"it had no event stream for {limits.reconnect_seconds:g} s (publishers.reconnect_seconds)"
    if now - presence.last_request >= limits.silence_seconds:
        return f"it sent no heartbeat for {limits.silence_seconds:g} s (publishers.silence_timeout_seconds)"
    return ""


def is_stalled(last_line: float, *, waits_for_caller: bool, limits: PresenceLimits, now: float) -> bool:
    """Whether a task has had no line of its result for too long; not while chunks wait for its caller."""
    return not waits_for_caller and now - last_line >= limits.task_silence_seconds


def check_seconds(limits: PresenceLimits) -> float:
    """Returns the interval of these checks: a quarter of the smallest limit, at most a second."""
    return min(1.0, limits.reconnect_seconds / 4, limits.silence_seconds / 4, limits.task_silence_seconds / 4)
