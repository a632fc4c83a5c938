"""Every bound of the scheduler."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Every bound of the scheduler."""

    queue_depth_per_runner: int = 16
    queue_timeout_seconds: float = 30.0
    """Longest wait for a slot. It does not run while a request waits for a sleeping model to wake, and begins then."""
    max_attempts: int = 3
    """Attempts on runners that took the request and failed before any content, and wakes that failed under it."""
    max_bounces: int = 8
    """Attempts on runners that did not take it: the view of the mesh was behind."""
    stale_view_bounces: int = 4
    """Bounces of one request from a model that is shown as ready, after which its runner is believed and asked to wake
    it: the registry is away and the model fell asleep."""
    bounce_pause_seconds: float = 0.25
    """How long a runner that bounced a request is left alone."""
    busy_pause_seconds: float = 0.25
    """How long a runner that was unexpectedly full is left alone; doubles each time in a row ..."""
    max_busy_pause_seconds: float = 2.0
    """... up to this. Such a request goes on waiting until the queue timeout."""
    break_pause_seconds: float = 1.0
    """How long a runner that broke is left alone, unless it reports ready as a new incarnation."""
    full_retry_seconds: float = 5.0
    """What a caller is told to wait when the queue is full."""
    wake_settle_seconds: float = 10.0
    """How long a model that was woken may take to be reported ready."""
