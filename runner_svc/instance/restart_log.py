"""The last restarts of an instance: when, why, and how long until it took requests again."""

from collections import deque
from dataclasses import dataclass, replace
from datetime import datetime

from weft.kernel.clock import Clock
from weft.kernel.reasons import Reason

MAX_RESTARTS = 20
"""How many are remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """One time that a backend ended, or was ended, because of a fault."""

    at: datetime
    """UTC, when the fault was noticed."""
    noticed: float
    """The same in seconds on the runner's monotonic clock."""
    reason: Reason
    detail: str
    recovery_seconds: float | None = None
    """From then until it took requests again; None: it does not yet, or was put to sleep first."""


class RestartLog:
    """Kept by the instance's life; everybody else reads."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._restarts: deque[Restart] = deque(maxlen=MAX_RESTARTS)
        self._unrecovered = 0
        self.total = 0
        """How many there were, those that are not remembered any more included."""

    @property
    def all(self) -> tuple[Restart, ...]:
        """Oldest first."""
        return tuple(self._restarts)

    @property
    def last_detail(self) -> str:
        """Why it was last restarted; empty when never."""
        return self._restarts[-1].detail if self._restarts else ""

    def note(self, reason: Reason, detail: str) -> None:
        """A fault was noticed just now."""
        self.total += 1
        at, noticed = self._clock.utc_now(), self._clock.monotonic()
        self._restarts.append(Restart(at=at, noticed=noticed, reason=reason, detail=detail))
        self._unrecovered = min(self._unrecovered + 1, MAX_RESTARTS)

    def note_ready(self) -> None:
        """It takes requests again: every fault since the last time is over."""
        now = self._clock.monotonic()
        for back in range(1, self._unrecovered + 1):
            restart = self._restarts[-back]
            self._restarts[-back] = replace(restart, recovery_seconds=now - restart.noticed)
        self._unrecovered = 0

    def note_asleep(self) -> None:
        """It was put to sleep: however long that lasts, it is no part of a recovery."""
        self._unrecovered = 0
