"""The pace of requests to a server that weft does not start: pauses it demands, and retries. Pure.

Whoever has said that it is busy is left alone for as long as it said, by every request, whoever sends it here. A
request is repeated only as often as the operator allows, and only where the server has done nothing for it.
"""

from dataclasses import dataclass

from weft.kernel.reasons import Reason

UNSAID_PAUSE_SECONDS = 1.0
"""How long a busy server is left alone that does not say for how long."""
FIRST_PAUSE_SECONDS = 0.5
"""Before the first repetition, where the server says nothing; doubles with each ..."""
MAX_PAUSE_SECONDS = 8.0
"""... up to this."""
_DONE_NOTHING = frozenset({Reason.BACKEND_NOT_READY, Reason.CONNECT_FAILED})
"""It said that it is busy, or there was no connection to it."""


@dataclass(slots=True)
class ServerPace:
    """The pace at which one model of one server is asked. Times are seconds on the caller's monotonic clock."""

    max_retries: int = 0
    _busy_until: float | None = None

    def seconds_to_wait(self, now: float) -> float:
        """How long it must still be left alone; 0: it may be asked."""
        return 0.0 if self._busy_until is None else max(0.0, self._busy_until - now)

    def note_busy(self, retry_after_seconds: float | None, now: float) -> None:
        """It said that it is busy. What it said before holds where that is longer."""
        until = now + (UNSAID_PAUSE_SECONDS if retry_after_seconds is None else retry_after_seconds)
        self._busy_until = until if self._busy_until is None else max(until, self._busy_until)

    def pause_before_retry(self, reason: Reason, retries: int, now: float, give_up_at: float) -> float | None:
        """How long to wait before a request that failed so, after `retries` repetitions, is sent again.

        None: it is not. That is so, too, where it would be too late at `give_up_at`.
        """
        if reason not in _DONE_NOTHING or retries >= self.max_retries:
            return None
        pause = max(self.seconds_to_wait(now), min(FIRST_PAUSE_SECONDS * 2.0**retries, MAX_PAUSE_SECONDS))
        return pause if now + pause < give_up_at else None
