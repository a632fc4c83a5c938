"""The candidates of one pool, and the choice of one of them."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import ceil

from router_svc.policy.arrival import Needs
from router_svc.policy.candidates import Candidate, Readiness
from router_svc.policy.capability import Profile, fits, profile_of
from router_svc.policy.choice import Wish
from router_svc.policy.choosing import least_loaded, prefix_affinity, random_choice, round_robin, session_affinity
from router_svc.policy.choosing.recent_places import RecentPlaces
from router_svc.policy.choosing.seats import Rank, Seat
from router_svc.policy.choosing.shelf import Shelf
from router_svc.policy.grants import CandidateKey
from router_svc.policy.rings import Ring
from router_svc.policy.settings import ChoicePolicy, PoolSettings

MAX_RING_STEPS = 8
"""Members of the ring that are asked in turn before the load alone decides."""
MAX_SAMPLED_PER_SHOWN = 1
"""Members that are looked at for each one that is shown."""
MAX_REMEMBERED_NEEDS = 1_024
"""Different needs for which it is remembered who fits."""
_RANKS: Mapping[ChoicePolicy, Callable[[Seat], Rank]] = {ChoicePolicy.ROUND_ROBIN: round_robin.by_turn}
_NAMES = {
    ChoicePolicy.LEAST_LOADED: least_loaded.NAME,
    ChoicePolicy.RANDOM: random_choice.NAME,
    ChoicePolicy.ROUND_ROBIN: round_robin.NAME,
    ChoicePolicy.PREFIX_AFFINITY: least_loaded.NAME,
}
"""What a choice is called that no affinity made."""


class Affinities:
    """Where sessions and beginnings of prompts last ran, over all pools."""

    def __init__(self, *, max_sessions: int, max_prefixes: int, load_factor: float) -> None:
        self.sessions = RecentPlaces(max_sessions)
        self.prefixes = RecentPlaces(max_prefixes)
        self.load_factor = load_factor
        """How much more than its share of its pool's load a candidate may have and still be preferred."""


class Pool:
    """One pool. It exists as long as it has members or requests of earlier members still run."""

    def __init__(self, name: str, settings: PoolSettings, affinities: Affinities) -> None:
        self.name = name
        self.settings = settings
        self.seats: dict[CandidateKey, Seat] = {}
        self.in_flight = 0
        """Requests on its members, and on those who were."""
        self.breaks_in_a_row = 0
        """Requests that broke on its members since one succeeded."""
        self.up = 0
        """Members that are not down."""
        self.ready_slots = 0
        self._goes_by_prefix = settings.policy is ChoicePolicy.PREFIX_AFFINITY
        self._goes_by_chance = settings.policy is ChoicePolicy.RANDOM
        self.policy_name = _NAMES[settings.policy]
        """What a choice here is called that no affinity made."""
        self._affinities = affinities
        self._shelves: dict[Profile, Shelf] = {}
        self._fitting: dict[Needs, tuple[Shelf, ...]] = {}
        self._rank = _RANKS.get(settings.policy, least_loaded.by_load)
        self._ready: dict[str, CandidateKey] = {}
        """Members that are ready, by model."""
        self._ring: Ring | None = None

    @property
    def is_at_its_cap(self) -> bool:
        """Whether as many requests run on its members as may."""
        return 0 < self.settings.max_in_flight <= self.in_flight

    @property
    def has_spare(self) -> bool:
        """Whether only their ejection keeps some members from requests."""
        return any(shelf.spare for shelf in self._shelves.values())

    @property
    def has_free(self) -> bool:
        """Whether somebody is free, if only for some needs. False: surely nobody is."""
        if 0 < self.settings.max_in_flight <= self.in_flight:
            return False
        # No any(): this is asked several times per request.
        for shelf in self._shelves.values():  # noqa: SIM110
            if shelf.open or shelf.spare:
                return True
        return False

    def take_in(self, seat: Seat) -> None:
        """A candidate of this pool appeared."""
        self.seats[seat.key] = seat
        self._count(seat, 1)
        self._shelf_for(seat).take_in(seat)

    def let_go(self, seat: Seat) -> None:
        """A candidate is gone from this pool; what still runs on it counts here until it is over."""
        self._count(seat, -1)
        self._take_off_shelf(seat)
        del self.seats[seat.key]

    def change(self, seat: Seat, candidate: Candidate) -> None:
        """This is known of a member now."""
        was = seat.candidate
        self._count(seat, -1)
        seat.candidate = candidate
        self._count(seat, 1)
        assert seat.shelf is not None, "every seat of a pool is on a shelf"
        if _same_profile(was, candidate):
            seat.shelf.put(seat)
        else:
            self._take_off_shelf(seat)
            self._shelf_for(seat).take_in(seat)

    def fitting(self, needs: Needs) -> tuple[Shelf, ...]:
        """The shelves of those who can serve such requests."""
        found = self._fitting.get(needs)
        if found is None:
            if len(self._fitting) >= MAX_REMEMBERED_NEEDS:
                self._fitting.clear()
            found = tuple(shelf for profile, shelf in self._shelves.items() if not fits(profile, needs))
            self._fitting[needs] = found
        return found

    def choose(self, wish: Wish) -> tuple[Seat, str] | None:
        """A free candidate and the name of the policy that chose it; None: nobody is free for it.

        The choice is remembered as if it was taken: the next request of its session should go there too.
        """
        if self.is_at_its_cap:
            return None
        shelves = self.fitting(wish.needs)
        by_session = self._by_session(shelves, wish) if wish.affinity_key else None
        chosen = by_session or self._by_policy(shelves, wish)
        if chosen is not None:
            self._remember(chosen[0], wish)
        return chosen

    def choose_ejected(self, wish: Wish) -> tuple[Seat, str] | None:
        """The least loaded of those whom only their ejection keeps from it, for when there is nobody else."""
        if self.is_at_its_cap:
            return None
        spare = [
            seat for shelf in self.fitting(wish.needs) for seat in shelf.spare.values() if seat.key not in wish.excluded
        ]
        if not spare:
            return None
        return min(spare, key=lambda seat: (least_loaded.by_load(seat), seat.key)), least_loaded.NAME

    def has_usable(self, wish: Wish) -> bool:
        """Whether somebody works and takes such requests, now or when he is done with others."""
        shelves = self.fitting(wish.needs)
        usable = sum(shelf.usable for shelf in shelves)
        if not usable or not wish.excluded:
            return usable > 0
        known = (self.seats.get(key) for key in wish.excluded)
        return usable > sum(seat is not None and seat.is_usable and seat.shelf in shelves for seat in known)

    def other_is_usable(self, seat: Seat) -> bool:
        """Whether anybody but this one works and takes requests of some kind."""
        usable = sum(shelf.usable for shelf in self._shelves.values())
        return usable > (seat.is_usable and seat.pool is self)

    def permitted(self, needs: Needs, excluded: Collection[CandidateKey]) -> Iterator[Seat]:
        """Those who have what is needed and are neither excluded nor down."""
        for shelf in self.fitting(needs):
            for seat in shelf.seats.values():
                if seat.key not in excluded and seat.candidate.readiness is not Readiness.DOWN:
                    yield seat

    def open_seat(self, key: CandidateKey, shelves: Sequence[Shelf], excluded: Collection[CandidateKey]) -> Seat | None:
        """A member by its key, if it is free for a request."""
        seat = self.seats.get(key)
        return seat if seat is not None and seat.is_open and seat.shelf in shelves and key not in excluded else None

    def bears_more(self, seat: Seat) -> bool:
        """Whether one request more leaves it within its share of the load, and a bit."""
        mean = (self.in_flight + 1) / (self.ready_slots or 1)
        return seat.in_flight < ceil(self._affinities.load_factor * mean * seat.candidate.slots)

    def owner_on_ring(self, key: int, shelves: Sequence[Shelf], excluded: Collection[CandidateKey]) -> Seat | None:
        """Who owns a key, or the next one on the ring who is free and within its share of the load."""
        for name in self._ready_ring().walk(key, MAX_RING_STEPS):
            seat = self.open_seat(self._ready[name], shelves, excluded)
            if seat is not None and self.bears_more(seat):
                return seat
        return None

    def some_seats(self, shelves: Sequence[Shelf], most: int) -> Iterable[Seat]:
        """All members where they are few; of many those who would be chosen first, and others to make up the number.

        `shelves`: of those who can serve the request.
        """
        if len(self.seats) <= most:
            return self.seats.values()
        some = [seat for shelf in shelves for seat in shelf.some_of_the_best(most)]
        if len(some) >= most:
            return some
        return dict.fromkeys((*some, *islice(self.seats.values(), MAX_SAMPLED_PER_SHOWN * most)))

    def _by_session(self, shelves: Sequence[Shelf], wish: Wish) -> tuple[Seat, str] | None:
        seat = session_affinity.of_session(self, shelves, wish, self._affinities.sessions)
        return None if seat is None else (seat, session_affinity.NAME)

    def _by_policy(self, shelves: Sequence[Shelf], wish: Wish) -> tuple[Seat, str] | None:
        if self._goes_by_prefix:
            seat = prefix_affinity.with_prefix(self, shelves, wish, self._affinities.prefixes)
            if seat is not None:
                return seat, prefix_affinity.NAME
        if self._goes_by_chance:
            seat = random_choice.draw(shelves, wish.excluded, wish.seed)
        else:
            seat = least_loaded.first_of(shelves, wish.excluded)
        return None if seat is None else (seat, self.policy_name)

    def _remember(self, seat: Seat, wish: Wish) -> None:
        if wish.affinity_key:
            session_affinity.remember_session(self, wish, seat, self._affinities.sessions)
        if self._goes_by_prefix:
            prefix_affinity.remember_prefix(self, wish, seat, self._affinities.prefixes)

    def _shelf_for(self, seat: Seat) -> Shelf:
        profile = profile_of(seat.candidate)
        shelf = self._shelves.get(profile)
        if shelf is None:
            shelf = self._shelves[profile] = Shelf(profile, self._rank)
            self._fitting.clear()
        return shelf

    def _take_off_shelf(self, seat: Seat) -> None:
        shelf = seat.shelf
        assert shelf is not None, "every seat of a pool is on a shelf"
        shelf.let_go(seat)
        if not shelf.seats:
            del self._shelves[shelf.profile]
            self._fitting.clear()

    def _count(self, seat: Seat, sign: int) -> None:
        """What is known of its candidate counts, or no longer does."""
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
        """The ring of those who are ready; it is made when the first key asks for it."""
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
