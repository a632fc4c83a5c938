"""When pauses and ejections of candidates end."""

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count
from math import inf

from router_svc.policy.choosing.seats import Seat


class PauseEnds:
    """A heap of the ends, with those in it that have been put off; each seat has one that counts."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, int, Seat]] = []
        self._numbers = count()
        self.first = inf
        """When the first of all ends, or somebody has to look whether one does; infinity: there is none."""

    def await_end(self, seat: Seat) -> None:
        """Its health changed: look at it again when its next pause or ejection ends."""
        end = seat.health.next_end
        if end is not None and end != seat.awaited_end:
            heappush(self._ends, (end, next(self._numbers), seat))
            self.first = self._ends[0][0]
        seat.awaited_end = end

    def over(self, now: float) -> Iterator[Seat]:
        """Those for whom one ended by now, each with its health brought up to now."""
        while self._ends and self._ends[0][0] <= now:
            seat = self._pop()
            seat.health.advance(now)
            self.await_end(seat)
            yield seat

    def next_end(self) -> float | None:
        """The earliest of all; None: there is none."""
        while self._ends and self._ends[0][0] != self._ends[0][2].health.next_end:
            self._pop()
        return self._ends[0][0] if self._ends else None

    def _pop(self) -> Seat:
        seat = heappop(self._ends)[2]
        self.first = self._ends[0][0] if self._ends else inf
        return seat
