"""The last restarts of an instance: when, why, and how long until it admitted requests again."""

from collections import deque
from dataclasses import dataclass, replace
from datetime import datetime

from weft.kernel.clock import Clock
from weft.kernel.reasons import Reason

MAX_RESTARTS = 20
"""Number of restarts that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """One end of a backend because of a fault."""

    at: datetime
    """UTC, when the fault was noticed."""
    noticed: float
    """The same in seconds on the runner's monotonic clock."""
    reason: Reason
    detail: str
    recovery_seconds: float | None = None
    """Time from the fault until requests were admitted again; None: not yet, or it was put to sleep first."""


class RestartLog:
    """The restarts of one instance and the output of its last crash. Written by the lifecycle loop only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._restarts: deque[Restart] = deque(maxlen=MAX_RESTARTS)
        self._unrecovered = 0
        self.total = 0
        """Number of faults so far, forgotten ones included; counted when they are noticed."""
        self.crash_lines: tuple[str, ...] = ()
        """The backend's output up to its last crash, oldest first, at most loader.MAX_CRASH_BYTES of it."""
        self.last_ready_at: datetime | None = None
        """UTC; None: it never was ready."""

    @property
    def all(self) -> tuple[Restart, ...]:
        """The restarts that are kept, oldest first."""
        return tuple(self._restarts)

    @property
    def last_detail(self) -> str:
        """The cause of the last restart; empty: there was none."""
        return self._restarts[-1].detail if self._restarts else ""

    def note(self, reason: Reason, detail: str) -> None:
        """Record a fault that was noticed just now."""
        self.total += 1
        at, noticed = self._clock.utc_now(), self._clock.monotonic()
        self._restarts.append(Restart(at=at, noticed=noticed, reason=reason, detail=detail))
        self._unrecovered = min(self._unrecovered + 1, MAX_RESTARTS)

    def note_ready(self) -> None:
        """Record that requests are admitted again: the recovery of every fault since the last time ends."""
        self.last_ready_at = self._clock.utc_now()
        now = self._clock.monotonic()
        for back in range(1, self._unrecovered + 1):
            restart = self._restarts[-back]
            self._restarts[-back] = replace(restart, recovery_seconds=now - restart.noticed)
        self._unrecovered = 0

    def note_asleep(self) -> None:
        """Record that it was put to sleep: the time asleep is no part of a recovery."""
        self._unrecovered = 0
