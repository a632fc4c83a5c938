"""Candidates of one pool that can serve the same requests: who of them is free, in the order of the pool's policy."""

from collections.abc import Callable, Collection
from heapq import heapify, heappop, heappush
from itertools import count

from router_svc.policy.capability import Profile
from router_svc.policy.choosing.seats import Rank, Seat
from router_svc.policy.grants import CandidateKey

MAX_STALE_SHARE = 2
"""The heap is rebuilt when it has more entries than this times the open seats ..."""
MIN_STALE_ENTRIES = 64
"""... and this many on top."""

_Entry = tuple[Rank, CandidateKey, int, Seat]


class Shelf:
    """A heap of the open seats with lazy invalidation, and a list of them to draw from."""

    def __init__(self, profile: Profile, rank: Callable[[Seat], Rank]) -> None:
        self.profile = profile
        self.open: list[Seat] = []
        self.spare: dict[CandidateKey, Seat] = {}
        self.seats: dict[CandidateKey, Seat] = {}
        self.usable = 0
        """Seats that take requests at all."""
        self._rank = rank
        self._heap: list[_Entry] = []
        self._numbers = count(1)

    def put(self, seat: Seat) -> bool:
        """A seat of this shelf changed: put it where it belongs. Returns whether it came free by that."""
        was_usable, was_open, was_free = seat.is_usable, seat.is_open, seat.is_open or seat.is_spare
        seat.settle()
        self.usable += seat.is_usable - was_usable
        if was_open and not seat.is_open:
            self._close(seat)
        elif seat.is_open:
            self._order(seat, is_new=not was_open)
        if seat.is_spare:
            self.spare[seat.key] = seat
        elif self.spare:
            self.spare.pop(seat.key, None)
        return not was_free and (seat.is_open or seat.is_spare)

    def take_in(self, seat: Seat) -> None:
        """It belongs here from now on."""
        self.seats[seat.key] = seat
        seat.shelf = self
        self.put(seat)

    def let_go(self, seat: Seat) -> None:
        """It does not belong here any more."""
        if seat.is_open:
            self._close(seat)
        self.usable -= seat.is_usable
        self.spare.pop(seat.key, None)
        del self.seats[seat.key]
        seat.is_open = seat.is_spare = seat.is_usable = False
        seat.shelf = None

    def first(self, excluded: Collection[CandidateKey]) -> Seat | None:
        """The open seat of the lowest rank that is not excluded; None: there is none."""
        heap = self._heap
        aside: list[_Entry] = []
        found = None
        while heap:
            _, key, number, seat = heap[0]
            # Numbers count on each shelf by itself, so one that moved may have this number on its new one.
            if seat.entry != number or seat.shelf is not self:
                heappop(heap)
            elif key in excluded:
                aside.append(heappop(heap))
            else:
                found = seat
                break
        for entry in aside:
            heappush(heap, entry)
        return found

    def some_of_the_best(self, most: int) -> list[Seat]:
        """Some of the open seats of low rank, the lowest one among them; in no order."""
        return [seat for _, _, number, seat in self._heap[:most] if seat.entry == number and seat.shelf is self]

    def _order(self, seat: Seat, *, is_new: bool) -> None:
        rank = self._rank(seat)
        if is_new:
            seat.place = len(self.open)
            self.open.append(seat)
        elif rank == seat.rank:
            return
        seat.rank, seat.entry = rank, next(self._numbers)
        heappush(self._heap, (rank, seat.key, seat.entry, seat))
        if len(self._heap) > MAX_STALE_SHARE * len(self.open) + MIN_STALE_ENTRIES:
            self._heap = [(each.rank, each.key, each.entry, each) for each in self.open]
            heapify(self._heap)

    def _close(self, seat: Seat) -> None:
        last = self.open.pop()
        if last is not seat:
            self.open[seat.place] = last
            last.place = seat.place
        seat.entry = 0
