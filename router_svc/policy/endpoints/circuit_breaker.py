"""The circuit breaker of an endpoint: pauses and ejections by the results of its requests.

A pause is short and follows one failure. An ejection follows many failures and ends with one trial request:

    works ──── breaks in a row, or too large a share of them ────▶ ejected
      ▲                                                             │ its time has passed
      └────────────── a success ────────────── on trial ◀───────────┘
                                                  └── it breaks: ejected for longer

`HealthMonitor` (`candidate_index`) decides whether to eject an endpoint, never the last usable one of a queue.
"""

from enum import Enum
from typing import Self

from router_svc.policy.limits import SchedulerLimits
from weft.kernel.errors.failover import FailureKind

CLEAN_AFTER_SECONDS = 10.0
"""Time after its last failure during which a runner counts as failing, unless a request succeeds first."""
EJECTION_BASE_SECONDS = 10.0
"""Length of an ejection, multiplied by the number of ejections in a row, up to `max_ejection_seconds`."""
OUTLIER_MAX_FAILURE_SHARE = 0.5
"""Share of failed requests above which a model is ejected even if the failures were not in a row."""
OUTLIER_WINDOW_SECONDS = 60.0
"""Window over which the share of failed requests is measured."""
MUCH_WORSE = 2.0
"""An endpoint is considered broken if its failure share is this many times another endpoint's."""
MAX_DOUBLINGS = 16
"""Larger exponents change nothing and would eventually overflow."""
NEVER = float("-inf")
_BROKE, _LOST = "failed", "its runner cannot be reached"


class HealthState(Enum):
    """Whether an endpoint gets requests, by its recent results."""

    WORKS = "works"
    EJECTED = "ejected"
    ON_TRIAL = "on trial"
    """Gets one request at a time until one succeeds."""


class _Window:
    """Counts successes and breaks over the last half to full window."""

    __slots__ = ("_began_at", "_broken", "_broken_before", "_good", "_good_before")

    def __init__(self) -> None:
        self._began_at = NEVER
        self._good = self._broken = self._good_before = self._broken_before = 0

    def add(self, *, good: bool, now: float, half_seconds: float) -> None:
        elapsed = now - self._began_at
        if elapsed >= half_seconds:
            fresh = elapsed < 2 * half_seconds
            self._good_before, self._broken_before = (self._good, self._broken) if fresh else (0, 0)
            self._good = self._broken = 0
            self._began_at = now
        if good:
            self._good += 1
        else:
            self._broken += 1

    def take_back_good(self) -> None:
        if self._good:
            self._good -= 1
        else:
            self._good_before = max(0, self._good_before - 1)

    def take_back_broken(self) -> None:
        if self._broken:
            self._broken -= 1
        else:
            self._broken_before = max(0, self._broken_before - 1)

    @property
    def broken(self) -> int:
        return self._broken + self._broken_before

    @property
    def total(self) -> int:
        return self._good + self._good_before + self.broken


class EndpointHealth:
    """Health of a candidate. A new incarnation of its runner starts with a new record."""

    __slots__ = (
        "_breaks_before_success",
        "_breaks_in_a_row",
        "_broke_at",
        "_busy_in_a_row",
        "_cause",
        "_ejected_until",
        "_ejections_in_a_row",
        "_has_succeeded",
        "_last_ejection_seconds",
        "_limits",
        "_paused_for",
        "_paused_until",
        "_shared_in_a_row",
        "_succeeded_at",
        "_window",
        "_worked_since",
        "is_lost",
        "paused",
        "state",
    )

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self.paused = False
        self.is_lost = False
        """Whether the connection to its runner was lost or refused, and no request has succeeded since."""
        self.state = HealthState.WORKS
        self._paused_until = self._ejected_until = self._broke_at = NEVER
        self._paused_for = self._cause = ""
        self._busy_in_a_row = self._breaks_in_a_row = self._ejections_in_a_row = 0
        self._breaks_before_success = 0
        self._shared_in_a_row = 0
        self._last_ejection_seconds = 0.0
        self._worked_since = NEVER
        self._has_succeeded = False
        self._succeeded_at = NEVER
        self._window = _Window()

    def note_success(self, now: float) -> None:
        """Record a success. An ejected endpoint stays ejected, as the request was granted before."""
        self._breaks_before_success = self._breaks_in_a_row
        self._busy_in_a_row = self._breaks_in_a_row = self._shared_in_a_row = 0
        self._has_succeeded, self._succeeded_at, self.is_lost = True, now, False
        self._note(good=True, now=now)
        if self.state is HealthState.ON_TRIAL:
            self.state = HealthState.WORKS
            self._worked_since = now
            self._window = _Window()

    def note_failure(self, kind: FailureKind, now: float, *, had_begun: bool = False) -> bool:
        """Record a failed attempt. Returns whether the endpoint should be ejected.

        `had_begun`: the answer had begun, so it was counted as a success.
        """
        limits = self._limits
        if had_begun:
            self._window.take_back_good()
            self._breaks_in_a_row = max(self._breaks_in_a_row, self._breaks_before_success)
        match kind:
            case FailureKind.BUSY:
                self._pause(now, self._busy_pause(), "full with requests that this router did not place")
            case FailureKind.BOUNCED:
                self._pause(now, limits.bounce_pause_seconds, "bounced a request")
            case FailureKind.UNREACHED:
                self.pause_lost(now)
            case FailureKind.BROKE:
                self._broke_at = now
                self._breaks_in_a_row += 1
                self._note(good=False, now=now)
                return self.state is not HealthState.EJECTED and self._is_outlier()
            case FailureKind.LACKS | FailureKind.FINAL:
                pass
        return False

    def pause_after_break(self, now: float) -> None:
        """Pause the endpoint because of the break that was just recorded."""
        self._pause(now, self._limits.break_pause_seconds, _BROKE)

    def pause_lost(self, now: float) -> None:
        """Pause the endpoint because its runner was lost or cannot be reached, for longer each time in a row."""
        # The requests that it had fail together.
        if not (self.is_lost and self.paused):
            self.is_lost = True
            self._pause(now, self._busy_pause(), _LOST)

    def is_much_worse_than(self, other: Self) -> bool:
        """Whether its failure share is far above that of another endpoint, which had no shared failure either."""
        return not other.shares_failures and self.failure_share >= MUCH_WORSE * other.failure_share

    @property
    def failure_share(self) -> float:
        """Share of its requests in the window that broke; 0 without requests."""
        return self._window.broken / self._window.total if self._window.total else 0.0

    @property
    def shares_failures(self) -> bool:
        """Whether any failure since its last success was shared by another candidate."""
        return self._shared_in_a_row > 0

    def excuses_shared_failure(self) -> bool:
        """Count a failure that another candidate shared. Returns whether it is excused."""
        self._shared_in_a_row += 1
        return self._shared_in_a_row <= self._limits.max_shared_failures

    def take_back_break(self, now: float) -> None:
        """Revoke the last break and its pause; an ejection stays."""
        self._window.take_back_broken()
        self._breaks_in_a_row = max(0, self._breaks_in_a_row - 1)
        if self.paused and self._paused_for == _BROKE:
            self.paused, self._paused_until = False, now

    def eject(self, now: float) -> None:
        """Eject the endpoint, for longer with each ejection in a row.

        In a row: it broke again before it had worked for as long as its last ejection.
        """
        limits = self._limits
        again = self.state is HealthState.ON_TRIAL or now - self._worked_since < self._last_ejection_seconds
        self._ejections_in_a_row = self._ejections_in_a_row + 1 if again else 1
        seconds = min(EJECTION_BASE_SECONDS * self._ejections_in_a_row, limits.max_ejection_seconds)
        self._last_ejection_seconds = seconds
        self._ejected_until = now + seconds
        self.state = HealthState.EJECTED

    def advance(self, now: float) -> None:
        """End the pause and the ejection that are due."""
        if self.paused and self._paused_until <= now:
            self.paused = False
        if self.state is HealthState.EJECTED and self._ejected_until <= now:
            self.state = HealthState.ON_TRIAL

    @property
    def is_quiet(self) -> bool:
        """Whether it is neither paused nor ejected nor on trial."""
        return not self.paused and self.state is HealthState.WORKS

    @property
    def next_end(self) -> float | None:
        """Return when the next pause or ejection ends; None: neither is active."""
        ends = []
        if self.paused:
            ends.append(self._paused_until)
        if self.state is HealthState.EJECTED:
            ends.append(self._ejected_until)
        return min(ends, default=None)

    @property
    def has_proven_itself(self) -> bool:
        """Whether a request succeeded and none broke since."""
        return self._has_succeeded and not self._breaks_in_a_row and self.state is HealthState.WORKS

    def has_succeeded_since(self, moment: float) -> bool:
        """Whether a request succeeded after this moment."""
        return self._succeeded_at > moment

    def has_not_failed_lately(self, now: float) -> bool:
        """Whether nothing broke for CLEAN_AFTER_SECONDS."""
        return self.state is HealthState.WORKS and now - self._broke_at >= CLEAN_AFTER_SECONDS

    def gate(self, now: float) -> str:
        """Return why it gets no requests, as text; empty: it may get one."""
        if self.state is HealthState.EJECTED:
            return f"{self._cause}; retried in {max(0.0, self._ejected_until - now):.0f} s"
        if self.paused:
            return f"{self._paused_for}; retried in {max(0.0, self._paused_until - now):.1f} s"
        return ""

    def _pause(self, now: float, seconds: float, why: str) -> None:
        if self.paused and self._paused_until > now + seconds:
            return
        self.paused, self._paused_until, self._paused_for = True, now + seconds, why

    def _busy_pause(self) -> float:
        doublings = min(self._busy_in_a_row, MAX_DOUBLINGS)
        self._busy_in_a_row += 1
        return min(self._limits.busy_pause_seconds * 2.0**doublings, self._limits.max_busy_pause_seconds)

    def _note(self, *, good: bool, now: float) -> None:
        self._window.add(good=good, now=now, half_seconds=OUTLIER_WINDOW_SECONDS / 2)

    def _is_outlier(self) -> bool:
        limits, window = self._limits, self._window
        if self.state is HealthState.ON_TRIAL:
            self._cause = "failed its trial request"
        elif self._breaks_in_a_row >= limits.eject_after_failures:
            self._cause = f"failed {self._breaks_in_a_row} times in a row"
        elif window.total >= limits.outlier_min_requests and window.broken > OUTLIER_MAX_FAILURE_SHARE * window.total:
            self._cause = f"failed {window.broken} of its last {window.total} requests"
        else:
            return False
        return True
