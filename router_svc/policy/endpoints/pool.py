"""The endpoints of one pool: candidates with their load and health, grouped by what they can serve.

- `Seat` is one candidate with everything that changes about it from one request to the next.
- `Shelf` holds the endpoints of a pool that can serve the same requests, ordered by the pool's selection policy.
- `Pool` holds all endpoints of a pool, its concurrency cap and the hash ring of its ready members.

Which free endpoint a request gets is decided in `selection.py`.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import count, islice
from math import ceil

from router_svc.policy.arrival import Needs
from router_svc.policy.endpoints.candidates import Candidate, CandidateKey, Readiness, RunnerKey
from router_svc.policy.endpoints.capability import Profile, fits, profile_of
from router_svc.policy.endpoints.choice import Considered, Wish
from router_svc.policy.endpoints.hash_ring import Ring
from router_svc.policy.endpoints.health import Health, Standing
from router_svc.policy.settings import PoolSettings

MAX_STALE_SHARE = 2
"""The heap of a group is rebuilt when it has more entries than this times the open endpoints ..."""
MIN_STALE_ENTRIES = 64
"""... and this many on top."""
MAX_RING_STEPS = 8
"""Ring members that are tried in turn before the selection falls back to load."""
MAX_SAMPLED_PER_SHOWN = 1
"""Members that are examined for each one that is shown."""
MAX_REMEMBERED_NEEDS = 1_024
"""Distinct needs for which the matching groups are cached."""
NEVER_GRANTED = -1
# Endpoints are settled twice per request, and looking up a member of an Enum takes longer than the rest of it.
_READY, _WORKS, _ON_TRIAL = Readiness.READY, Standing.WORKS, Standing.ON_TRIAL

Rank = tuple[float, ...]
"""Sort key of the free endpoints of a group; the lowest is selected first."""


class RunnerLoad:
    """Number of requests that one runner incarnation works on, over all its models."""

    __slots__ = ("key", "limits", "requests", "seats")

    def __init__(self, key: RunnerKey) -> None:
        self.key = key
        self.requests = 0
        self.seats: dict[CandidateKey, Seat] = {}
        """The runner's endpoints that are in the cluster."""
        self.limits: Counter[int] = Counter()
        """Request limits of the runner's candidates, and how many candidates have each limit."""

    def change_limit(self, was: int, becomes: int) -> None:
        """Replace the limit of one candidate; 0 means no limit, or no such candidate."""
        if was:
            self.limits[was] -= 1
            if not self.limits[was]:
                del self.limits[was]
        if becomes:
            self.limits[becomes] += 1


class Seat:
    """One candidate in its pool, with its load and health. Only the pool and the candidate index change it."""

    __slots__ = (
        "awaited_end",
        "candidate",
        "considered",
        "entry",
        "granted",
        "health",
        "held_for",
        "in_flight",
        "is_open",
        "is_spare",
        "is_usable",
        "key",
        "place",
        "pool",
        "rank",
        "runner",
        "shelf",
        "trying",
    )

    def __init__(self, candidate: Candidate, pool: "Pool", runner: RunnerLoad, health: Health) -> None:
        self.candidate = candidate
        self.key: CandidateKey = candidate.key
        self.runner = runner
        self.health = health
        self.pool = pool
        """The pool that counts its requests, also after it left that pool."""
        self.shelf: Shelf | None = None
        """None: its candidate left the cluster, and requests still run on it."""
        self.in_flight = 0
        self.granted = NEVER_GRANTED
        """Number of its last grant; grants are numbered over all endpoints."""
        self.held_for: str | None = None
        """The model that is to be loaded in its place, empty if that is unknown; None: it is not held."""
        self.trying = False
        """Whether a trial request runs on it. Any request that ends there allows the next trial: which one was the
        trial is not recorded.
        """
        self.awaited_end: float | None = None
        """End of its pause or ejection, as scheduled in `PauseEnds`."""
        self.is_open = False
        """Whether it takes a request now."""
        self.is_spare = False
        """Whether its ejection is the only reason that it takes none."""
        self.is_usable = False
        """Whether it takes requests at all: ready, not held and healthy."""
        self.rank: Rank = ()
        self.entry = 0
        """Number of its valid heap entry in its group; 0: none."""
        self.considered: tuple[int, Considered] | None = None
        """Cached description of it for decisions, with its position in a route; None: stale."""
        self.place = 0
        """Index in the list of open endpoints of its group."""

    @property
    def is_full(self) -> bool:
        """Whether all its slots are granted."""
        return self.in_flight >= self.candidate.slots

    @property
    def runner_is_full(self) -> bool:
        """Whether its runner is at its request limit over all models."""
        most = self.candidate.runner_max_requests
        return bool(most) and self.runner.requests >= most

    @property
    def share(self) -> float:
        """Share of its slots that are granted."""
        return self.in_flight / (self.candidate.slots or 1)

    def settle(self) -> None:
        """Recompute what it is open for, after any change of it."""
        self.considered = None
        takes = self.candidate.readiness is _READY and self.held_for is None
        standing = self.health.standing
        self.is_usable = is_usable = takes and standing is _WORKS
        has_room = takes and not (self.is_full or self.health.paused or self.runner_is_full)
        self.is_open = is_open = has_room and (is_usable or (standing is _ON_TRIAL and not self.trying))
        self.is_spare = has_room and not is_open


_Entry = tuple[Rank, CandidateKey, int, Seat]


class Shelf:
    """Endpoints of one pool with equal profiles: a heap of the open ones with lazy invalidation, and a list of them."""

    def __init__(self, profile: Profile, rank: Callable[[Seat], Rank]) -> None:
        self.profile = profile
        self.open: list[Seat] = []
        self.spare: dict[CandidateKey, Seat] = {}
        self.seats: dict[CandidateKey, Seat] = {}
        self.usable = 0
        """Number of endpoints that take requests at all."""
        self._rank = rank
        self._heap: list[_Entry] = []
        self._numbers = count(1)

    def put(self, seat: Seat) -> bool:
        """Reorder an endpoint of this group that changed. Returns whether the change made it free."""
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

    def add(self, seat: Seat) -> None:
        """Add an endpoint to this group."""
        self.seats[seat.key] = seat
        seat.shelf = self
        self.put(seat)

    def remove(self, seat: Seat) -> None:
        """Remove an endpoint from this group; it is then neither open nor usable."""
        if seat.is_open:
            self._close(seat)
        self.usable -= seat.is_usable
        self.spare.pop(seat.key, None)
        del self.seats[seat.key]
        seat.is_open = seat.is_spare = seat.is_usable = False
        seat.shelf = None

    def first(self, excluded: Collection[CandidateKey]) -> Seat | None:
        """Return the open endpoint of the lowest rank that is not excluded; None: there is none."""
        heap = self._heap
        aside: list[_Entry] = []
        found = None
        while heap:
            _, key, number, seat = heap[0]
            # Entries are numbered per group, so an endpoint that moved may have this number in its new group.
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
        """Return some of the open endpoints of low rank, the lowest one among them; unordered."""
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


class Pool:
    """The endpoints of one pool. It exists while it has members, or requests of earlier members still run."""

    def __init__(self, name: str, settings: PoolSettings, rank: Callable[[Seat], Rank], load_factor: float) -> None:
        self.name = name
        self.settings = settings
        self.seats: dict[CandidateKey, Seat] = {}
        self.in_flight = 0
        """Requests on its members and on its earlier members."""
        self.breaks_in_a_row = 0
        """Requests that broke on its members since one succeeded."""
        self.up = 0
        """Number of members that are not down."""
        self.ready_slots = 0
        self._rank = rank
        self._load_factor = load_factor
        """Multiple of its share of the pool's load up to which an endpoint is preferred for its cache."""
        self._shelves: dict[Profile, Shelf] = {}
        self._fitting: dict[Needs, tuple[Shelf, ...]] = {}
        self._ready: dict[str, CandidateKey] = {}
        """Ready members, by model."""
        self._ring: Ring | None = None

    @property
    def is_at_its_cap(self) -> bool:
        """Whether the pool has reached `max_in_flight`."""
        return 0 < self.settings.max_in_flight <= self.in_flight

    @property
    def has_spare(self) -> bool:
        """Whether ejection alone keeps some members from requests."""
        return any(shelf.spare for shelf in self._shelves.values())

    @property
    def has_free(self) -> bool:
        """Whether some member may be free, if only for some needs. False: none is."""
        if 0 < self.settings.max_in_flight <= self.in_flight:
            return False
        # No any(): this runs several times per request.
        for shelf in self._shelves.values():  # noqa: SIM110
            if shelf.open or shelf.spare:
                return True
        return False

    # -- membership

    def add(self, seat: Seat) -> None:
        """Add a member."""
        self.seats[seat.key] = seat
        self._count(seat, 1)
        self._shelf_for(seat).add(seat)

    def remove(self, seat: Seat) -> None:
        """Remove a member; requests that still run on it count here until they end."""
        self._count(seat, -1)
        self._remove_from_shelf(seat)
        del self.seats[seat.key]

    def change(self, seat: Seat, candidate: Candidate) -> None:
        """Replace the candidate of a member."""
        was = seat.candidate
        self._count(seat, -1)
        seat.candidate = candidate
        self._count(seat, 1)
        assert seat.shelf is not None, "every endpoint of a pool is in a group"
        if _same_profile(was, candidate):
            seat.shelf.put(seat)
        else:
            self._remove_from_shelf(seat)
            self._shelf_for(seat).add(seat)

    # -- which members can serve a request

    def fitting(self, needs: Needs) -> tuple[Shelf, ...]:
        """Return the groups whose endpoints can serve such requests."""
        found = self._fitting.get(needs)
        if found is None:
            if len(self._fitting) >= MAX_REMEMBERED_NEEDS:
                self._fitting.clear()
            found = tuple(shelf for profile, shelf in self._shelves.items() if not fits(profile, needs))
            self._fitting[needs] = found
        return found

    def spare_seats(self, wish: Wish) -> list[Seat]:
        """Return the endpoints for a request that only their ejection keeps from it."""
        return [
            seat for shelf in self.fitting(wish.needs) for seat in shelf.spare.values() if seat.key not in wish.excluded
        ]

    def has_usable(self, wish: Wish) -> bool:
        """Whether a healthy member takes such requests, now or once it has a free slot."""
        shelves = self.fitting(wish.needs)
        usable = sum(shelf.usable for shelf in shelves)
        if not usable or not wish.excluded:
            return usable > 0
        known = (self.seats.get(key) for key in wish.excluded)
        return usable > sum(seat is not None and seat.is_usable and seat.shelf in shelves for seat in known)

    def other_is_usable(self, seat: Seat) -> bool:
        """Whether a healthy member other than this one takes requests of some kind."""
        usable = sum(shelf.usable for shelf in self._shelves.values())
        return usable > (seat.is_usable and seat.pool is self)

    def permitted(self, needs: Needs, excluded: Collection[CandidateKey]) -> Iterator[Seat]:
        """Yield the members that meet the needs and are neither excluded nor down."""
        for shelf in self.fitting(needs):
            for seat in shelf.seats.values():
                if seat.key not in excluded and seat.candidate.readiness is not Readiness.DOWN:
                    yield seat

    def open_seat(self, key: CandidateKey, shelves: Sequence[Shelf], excluded: Collection[CandidateKey]) -> Seat | None:
        """Return a member by its key if it is free for a request."""
        seat = self.seats.get(key)
        return seat if seat is not None and seat.is_open and seat.shelf in shelves and key not in excluded else None

    def bears_more(self, seat: Seat) -> bool:
        """Whether one more request leaves a member within its bounded share of the pool's load."""
        mean = (self.in_flight + 1) / (self.ready_slots or 1)
        return seat.in_flight < ceil(self._load_factor * mean * seat.candidate.slots)

    def owner_on_ring(self, key: int, shelves: Sequence[Shelf], excluded: Collection[CandidateKey]) -> Seat | None:
        """Return the owner of a key, or the next ring member that is free and within its share of the load."""
        for name in self._ready_ring().walk(key, MAX_RING_STEPS):
            seat = self.open_seat(self._ready[name], shelves, excluded)
            if seat is not None and self.bears_more(seat):
                return seat
        return None

    def some_seats(self, shelves: Sequence[Shelf], most: int) -> Iterable[Seat]:
        """Return all members where they are few; otherwise the ones of best rank, filled up with others.

        `shelves`: the groups that can serve the request.
        """
        if len(self.seats) <= most:
            return self.seats.values()
        some = [seat for shelf in shelves for seat in shelf.some_of_the_best(most)]
        if len(some) >= most:
            return some
        return dict.fromkeys((*some, *islice(self.seats.values(), MAX_SAMPLED_PER_SHOWN * most)))

    def _shelf_for(self, seat: Seat) -> Shelf:
        profile = profile_of(seat.candidate)
        shelf = self._shelves.get(profile)
        if shelf is None:
            shelf = self._shelves[profile] = Shelf(profile, self._rank)
            self._fitting.clear()
        return shelf

    def _remove_from_shelf(self, seat: Seat) -> None:
        shelf = seat.shelf
        assert shelf is not None, "every endpoint of a pool is in a group"
        shelf.remove(seat)
        if not shelf.seats:
            del self._shelves[shelf.profile]
            self._fitting.clear()

    def _count(self, seat: Seat, sign: int) -> None:
        """Add a member's candidate to the totals (sign 1), or subtract it (sign -1)."""
        candidate = seat.candidate
        if candidate.readiness is not Readiness.DOWN:
            self.up += sign
        if candidate.readiness is not Readiness.READY:
            return
        self.ready_slots += sign * candidate.slots
        if sign > 0:
            self._ready[candidate.model] = seat.key
        else:
            del self._ready[candidate.model]
        if self._ring is not None and sign > 0:
            self._ring.add(candidate.model)
        elif self._ring is not None:
            self._ring.remove(candidate.model)

    def _ready_ring(self) -> Ring:
        """Return the hash ring of the ready members; it is built on first use."""
        if self._ring is None:
            self._ring = Ring()
            for name in self._ready:
                self._ring.add(name)
        return self._ring


def _same_profile(one: Candidate, other: Candidate) -> bool:
    return (
        one.operations == other.operations
        and one.remote == other.remote
        and one.skills == other.skills
        and one.tools == other.tools
        and one.context_tokens == other.context_tokens
    )
