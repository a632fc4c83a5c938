"""Back-off of retries, redials, engine restarts, and requests to busy servers. Pure."""

from dataclasses import dataclass, replace

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

FIRST_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 5.0
MAX_DOUBLINGS = 16
MAX_RESTART_DOUBLINGS = 64
"""Prevents float overflow; the longest pause is reached earlier."""
DEFAULT_BUSY_SECONDS = 2.0
"""Pause for a busy server without a Retry-After; BUSY_GROWTH times as long each time in a row ..."""
BUSY_GROWTH = 4.0
MAX_BUSY_SECONDS = 32.0
"""... up to this."""
FIRST_SERVER_PAUSE_SECONDS = 0.5
"""Pause before the first retry at a server without a Retry-After; doubles with each retry."""
MAX_SERVER_PAUSE_SECONDS = 8.0
"""Maximum of that pause."""
BUSY_REASONS = frozenset({Reason.BACKEND_NOT_READY, Reason.RATE_LIMIT_EXCEEDED})
"""Reasons of a server that takes no request now."""
_NOT_STARTED = BUSY_REASONS | {Reason.CONNECT_FAILED}
"""Reasons that mean that the server did not start working on the request."""


def retry_pause_seconds(failures: int, jitter: float) -> float:
    """Returns the pause after a number of consecutive failures; `jitter` (0 to 1) scales it from half to full length.

    Without jitter all runners would reconnect to a registry simultaneously.
    """
    doublings = max(0, min(failures - 1, MAX_DOUBLINGS))
    full = min(FIRST_PAUSE_SECONDS * (1 << doublings), MAX_PAUSE_SECONDS)
    return full * (0.5 + jitter / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedialLimits:
    """Limits of the back-off of dialing."""

    first_seconds: float = 0.5
    """Maximum of the first pause."""
    max_seconds: float = 30.0
    min_seconds: float = 0.05
    """Minimum pause: prevents a tight loop if the peer closes each link immediately."""
    share_of_absence: float = 0.5
    """Maximum pause as a share of the time since the last success. A returning peer is found within this share of its
    absence, and the number of attempts grows with the logarithm of the absence."""
    success_seconds: float = 0.5
    """Minimum duration of a registered session to count as a success."""
    steady_seconds: float = 10.0
    """Minimum duration of a session to count as a success if another session replaced it."""


class RedialPolicy:
    """Back-off with full jitter that grows with the time since the last success and is reset by each success.

    Full jitter spreads the reconnects of all runners after an outage. A success is a session that was registered and
    lasted for a moment, not a mere connection; so a flapping link is redialed soon. Times are monotonic seconds.
    """

    def __init__(self, now: float, limits: RedialLimits | None = None) -> None:
        """`now`: time of the first attempt."""
        self._limits = limits or RedialLimits()
        self._success_at = now

    def failed(self, sample: float, now: float) -> float:
        """Returns the pause after a failed attempt or a lost link. `sample` is a random number from 0 up to 1."""
        limits = self._limits
        ceiling = max(limits.first_seconds, limits.share_of_absence * (now - self._success_at))
        return max(limits.min_seconds, sample * min(ceiling, limits.max_seconds))

    def ended(self, stood_seconds: float, now: float, *, replaced: bool = False) -> None:
        """Records the end of a registered session; `replaced`: another session took its place.

        This limits how fast two runners with copies of one session file replace each other.
        """
        needed = self._limits.steady_seconds if replaced else self._limits.success_seconds
        if stood_seconds >= needed:
            self._success_at = now


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """What counts as a crash loop: `max_deaths` within `window_seconds` (5 in 30 s, as is usual for supervisors)."""

    max_deaths: int = 5
    window_seconds: float = 30.0
    first_pause_seconds: float = 10.0
    """Pause after the first crash loop; doubles with every further one."""
    max_pause_seconds: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartHistory:
    """The history of deaths. Times are monotonic seconds."""

    total: int = 0
    deaths: tuple[float, ...] = ()
    """Times of the last consecutive deaths, at most `max_deaths`."""
    pauses: int = 0
    """Number of consecutive pauses."""

    def after_death(
        self, now: float, limits: RestartLimits, *, must_pause: bool = False
    ) -> "tuple[RestartHistory, float]":
        """Returns the history with a death at `now`, and the pause before the next start in seconds; 0: none.

        `must_pause`: always pause, for deaths that an immediate start would repeat.
        """
        deaths = tuple(at for at in self.deaths if now - at < limits.window_seconds)
        pauses = self.pauses if deaths else 0
        deaths = (*deaths, now)[-limits.max_deaths :]
        history = replace(self, total=self.total + 1, deaths=deaths, pauses=pauses)
        if len(deaths) < limits.max_deaths and not must_pause:
            return history, 0.0
        pause = min(limits.first_pause_seconds * 2.0 ** min(pauses, MAX_RESTART_DOUBLINGS), limits.max_pause_seconds)
        # The pause does not count as healthy time: the window continues at the next start.
        resumed = (now + pause,) * len(deaths)
        return replace(history, deaths=resumed, pauses=pauses + 1), pause


@dataclass(slots=True)
class ServerBackoff:
    """Back-off of requests for one model of an external server. Times are monotonic seconds.

    A Retry-After of the server pauses all requests. A request is retried at most as often as the operator allows, and
    only if the server has not worked on it.
    """

    max_retries: int = 0
    why: WeftError | None = None
    """The server's last error of a busy server; None: there was none."""
    _busy_until: float | None = None
    _busy_in_a_row: int = 0

    def seconds_to_wait(self, now: float) -> float:
        """Returns the remaining pause; 0: requests may be sent."""
        return 0.0 if self._busy_until is None else max(0.0, self._busy_until - now)

    def note_busy(self, error: WeftError, now: float) -> None:
        """Records that the server is busy, and sets the pause in its error. Never shortens the current pause."""
        if self.seconds_to_wait(now) == 0.0:
            self._busy_in_a_row += 1
        # A server that names too short a time again and again is asked less often as well.
        times = self._busy_in_a_row - (2 if error.retry_after_seconds else 1)
        own = min(DEFAULT_BUSY_SECONDS * BUSY_GROWTH ** min(times, MAX_DOUBLINGS), MAX_BUSY_SECONDS)
        until = now + max(error.retry_after_seconds or 0.0, own if times >= 0 else 0.0)
        self._busy_until = until if self._busy_until is None else max(until, self._busy_until)
        self.why = error
        error.retry_after_seconds = self.seconds_to_wait(now)

    def note_open(self) -> None:
        """Records that the server has accepted a request."""
        self._busy_in_a_row = 0

    def pause_before_retry(self, reason: Reason, retries: int, now: float, give_up_at: float) -> float | None:
        """Returns the pause before retrying a request that failed for `reason` after `retries` retries.

        None: do not retry, for example because the pause would end after `give_up_at`.
        """
        if reason not in _NOT_STARTED or retries >= self.max_retries:
            return None
        pause = max(self.seconds_to_wait(now), min(FIRST_SERVER_PAUSE_SECONDS * 2.0**retries, MAX_SERVER_PAUSE_SECONDS))
        return pause if now + pause < give_up_at else None
