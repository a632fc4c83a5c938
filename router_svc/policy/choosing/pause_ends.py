"""When pauses and ejections of candidates end."""

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count

from router_svc.policy.choosing.seats import Seat


class PauseEnds:
    """A heap of the ends, with those in it that have been put off; each seat has one that counts."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, int, Seat]] = []
        self._numbers = count()

    def await_end(self, seat: Seat) -> None:
        """Its health changed: look at it again when its next pause or ejection ends."""
        end = seat.health.next_end
        if end is not None and end != seat.awaited_end:
            heappush(self._ends, (end, next(self._numbers), seat))
        seat.awaited_end = end

    def over(self, now: float) -> Iterator[Seat]:
        """Those for whom one ended by now, each with its health brought up to now."""
        while self._ends and self._ends[0][0] <= now:
            seat = heappop(self._ends)[2]
            seat.health.advance(now)
            self.await_end(seat)
            yield seat

    def next_end(self) -> float | None:
        """The earliest of all; None: there is none."""
        while self._ends and self._ends[0][0] != self._ends[0][2].health.next_end:
            heappop(self._ends)
        return self._ends[0][0] if self._ends else None
