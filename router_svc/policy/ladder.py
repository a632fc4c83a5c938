"""Routes: which of a ladder's candidates answers, and who of them is left out of it."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from router_svc.policy.arrival import ROUTE_PREFIX, Needs
from router_svc.policy.candidates import Candidate, Readiness
from router_svc.policy.choice import Wish
from router_svc.policy.choosing.pool import Pool
from router_svc.policy.choosing.seats import Seat
from router_svc.policy.choosing.shelf import Shelf
from router_svc.policy.grants import CandidateKey
from router_svc.policy.routes import Route

PRIMARY = 0


class Rung:
    """One entry of a ladder as the mesh is now: a pool, or one model of a pool.

    A wish is asked of it as it is allowed there: where nobody may be off the premises, nothing remote is wished for.
    """

    __slots__ = ("_only", "gate", "pool", "position", "takes_remote")

    def __init__(self, position: int, pool: Pool, only: Seat | None, *, takes_remote: bool) -> None:
        self.position = position
        self.pool = pool
        self.takes_remote = takes_remote
        self.gate = ""
        """What keeps all of it from the request at hand, in words; empty: nothing."""
        self._only = only

    def needs(self, needs: Needs) -> Needs:
        """What is needed of this rung's candidates."""
        return replace(needs, allow_remote=False) if needs.allow_remote and not self.takes_remote else needs

    def choose(self, wish: Wish) -> tuple[Seat, str] | None:
        """See Pool.choose."""
        wish = self._allowed(wish)
        if self._only is None:
            return self.pool.choose(wish)
        return (self._only, self.pool.policy_name) if self._is_free(self._only.is_open, wish) else None

    def choose_ejected(self, wish: Wish) -> tuple[Seat, str] | None:
        """See Pool.choose_ejected."""
        wish = self._allowed(wish)
        if self._only is None:
            return self.pool.choose_ejected(wish)
        return (self._only, self.pool.policy_name) if self._is_free(self._only.is_spare, wish) else None

    def has_usable(self, wish: Wish) -> bool:
        """See Pool.has_usable."""
        wish = self._allowed(wish)
        if self._only is None:
            return self.pool.has_usable(wish)
        return self._only.is_usable and self._fits(wish)

    def has_free(self) -> bool:
        """See Pool.has_free."""
        if self._only is None:
            return self.pool.has_free
        return not self.pool.is_at_its_cap and (self._only.is_open or self._only.is_spare)

    def permitted(self, needs: Needs, excluded: Collection[CandidateKey]) -> Iterator[Seat]:
        """See Pool.permitted."""
        needs, seat = self.needs(needs), self._only
        if seat is None:
            yield from self.pool.permitted(needs, excluded)
        elif (
            seat.shelf in self.pool.fitting(needs)
            and seat.key not in excluded
            and seat.candidate.readiness is not Readiness.DOWN
        ):
            yield seat

    def has_other_usable(self, seat: Seat) -> bool:
        """Whether anybody here but this one works and takes requests of some kind."""
        if self._only is None:
            return self.pool.other_is_usable(seat)
        return self._only.is_usable and self._only is not seat

    def seats(self) -> Iterator[Seat]:
        """All its candidates."""
        return (seat for seat in self._all() if not self.leaves_out(seat))

    def stripped(self) -> Iterator[Seat]:
        """Those whom the mesh's settings leave out of it."""
        return (seat for seat in self._all() if self.leaves_out(seat))

    def some_seats(self, shelves: Sequence[Shelf], most: int) -> Iterable[Seat]:
        """See Pool.some_seats; those who are left out may be among them."""
        return self.pool.some_seats(shelves, most) if self._only is None else (self._only,)

    def leaves_out(self, seat: Seat) -> bool:
        """Whether the mesh's settings leave this one out of it."""
        return seat.candidate.remote and not self.takes_remote

    def holds(self, seat: Seat) -> bool:
        """Whether it is one of its candidates."""
        return seat.pool is self.pool and self._only in (None, seat)

    def count(self) -> int:
        """How many candidates it has, those who are left out among them."""
        return len(self.pool.seats) if self._only is None else 1

    def up(self) -> int:
        """How many of them are not down."""
        if self._only is None:
            return self.pool.up
        return int(self._only.candidate.readiness is not Readiness.DOWN)

    def ready_slots(self) -> int:
        """Slots of those who are ready."""
        if self._only is None:
            return self.pool.ready_slots
        return self._only.candidate.slots if self._only.candidate.readiness is Readiness.READY else 0

    def in_flight(self) -> int:
        """Requests that run on them."""
        return self.pool.in_flight if self._only is None else self._only.in_flight

    def _allowed(self, wish: Wish) -> Wish:
        if self.takes_remote or not wish.needs.allow_remote:
            return wish
        return wish._replace(needs=self.needs(wish.needs))

    def _is_free(self, is_free: bool, wish: Wish) -> bool:
        return is_free and not self.pool.is_at_its_cap and self._fits(wish)

    def _fits(self, wish: Wish) -> bool:
        assert self._only is not None, "asked of single models"
        return self._only.key not in wish.excluded and self._only.shelf in self.pool.fitting(wish.needs)

    def _all(self) -> Iterable[Seat]:
        return self.pool.seats.values() if self._only is None else (self._only,)


class Ladder:
    """A route over the pools and models that there are."""

    def __init__(self, route: Route, *, cloud_fallback: bool) -> None:
        self.route = route
        self._cloud_fallback = cloud_fallback

    def admits(self, candidate: Candidate, name: str) -> bool:
        """Whether a candidate that an entry of this name stands for belongs to it."""
        return self._cloud_fallback or not candidate.remote or self.route.candidates[PRIMARY] == name

    def rungs(self, pool_called: Callable[[str], Pool | None], seat_of: Callable[[str], Seat | None]) -> Iterator[Rung]:
        """Its entries that the mesh has, best first. A name that is both a pool's and a model's is the pool's."""
        for position, name in enumerate(self.route.candidates):
            takes_remote = position == PRIMARY or self._cloud_fallback
            pool = pool_called(name)
            if pool is not None:
                yield Rung(position, pool, None, takes_remote=takes_remote)
                continue
            seat = seat_of(name)
            if seat is not None:
                yield Rung(position, seat.pool, seat, takes_remote=takes_remote)


class Ladders:
    """All routes, by their lines."""

    def __init__(self, routes: Mapping[str, Route], *, cloud_fallback: bool) -> None:
        self.lines = {
            f"{ROUTE_PREFIX}{name}": Ladder(route, cloud_fallback=cloud_fallback) for name, route in routes.items()
        }
        self._naming: dict[str, list[str]] = {}
        """The lines with an entry of a name."""
        for line, ladder in self.lines.items():
            for name in ladder.route.candidates:
                self._naming.setdefault(name, []).append(line)

    def of(self, line: str) -> Ladder | None:
        """The ladder of a line; None: it is no route's."""
        return self.lines.get(line)

    def lines_with(self, candidate: Candidate, names: Sequence[str]) -> Iterator[str]:
        """The lines that a candidate is in, by the names that stand for it; some of them twice."""
        if self._naming:
            for name in names:
                yield from (line for line in self._naming.get(name, ()) if self.lines[line].admits(candidate, name))
