"""The last restarts of an instance: when, why, and how long until it admitted requests again."""

from collections import deque
from typing import TYPE_CHECKING

from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import Clock

if TYPE_CHECKING:
    from datetime import datetime

MAX_RESTARTS = 20


class RestartLog:
    """The restarts of one instance and the output of its last crash. Written by the lifecycle loop only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._restarts: deque[pb.Restart] = deque(maxlen=MAX_RESTARTS)
        self._unrecovered: deque[float] = deque(maxlen=MAX_RESTARTS)
        """Monotonic times of the last faults without a recovery so far."""
        self.total = 0
        """Total number of faults, counted when they are detected."""
        self.crash_lines: tuple[str, ...] = ()
        """The backend's output up to its last crash, oldest first, at most loader.MAX_CRASH_BYTES."""
        self.last_ready_at: datetime | None = None
        """UTC; None: it was never ready."""

    @property
    def all(self) -> tuple[pb.Restart, ...]:
        """The kept restarts, oldest first. Read-only."""
        return tuple(self._restarts)

    @property
    def last_detail(self) -> str:
        """The cause of the last restart; empty: none."""
        return self._restarts[-1].detail if self._restarts else ""

    def note(self, reason: Reason, detail: str) -> None:
        """Records a fault that was just detected."""
        self.total += 1
        restart = pb.Restart(reason=reason.value, detail=detail)  # type: ignore[arg-type]  # same numbers
        restart.time.FromDatetime(self._clock.utc_now())
        self._restarts.append(restart)
        self._unrecovered.append(self._clock.monotonic())

    def note_ready(self) -> None:
        """Records that requests are admitted again, which ends the recovery of all faults since the last time."""
        self.last_ready_at = self._clock.utc_now()
        now = self._clock.monotonic()
        for back, noticed in enumerate(reversed(self._unrecovered), 1):
            self._restarts[-back].recovery.FromNanoseconds(round((now - noticed) * 1e9))
        self._unrecovered.clear()

    def note_asleep(self) -> None:
        """Records that it was put to sleep: the time asleep does not count as recovery."""
        self._unrecovered.clear()
