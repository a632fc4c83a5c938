"""Routes: ordered lists of models or pools, tried one after the other, and their steps in the current cluster."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from router_svc.policy.arrival import ROUTE_PREFIX, Needs
from router_svc.policy.endpoints.candidates import Candidate, CandidateKey, Readiness
from router_svc.policy.endpoints.choice import Wish
from router_svc.policy.endpoints.pool import Pool, Seat, Shelf
from router_svc.policy.endpoints.selection import Selector, choose_ejected, policy_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A ladder, best first."""

    name: str
    candidates: tuple[str, ...]
    """Models or pools, by name; the first is the primary."""
    budget_seconds: float | None = None
    """Who would take longer from arrival to end is refused, who has begun is not; None: the request's own deadline."""
    keep_alive_seconds: float | None = None
    """How long the model stays loaded after a request; negative: until it is unloaded; None: as it is configured."""
    pin_primary: bool = False
    """Whether the primary is waited for as long as it is there at all."""


PRIMARY = 0


class Rung:
    """One entry of a route in the current cluster: a pool, or one model of a pool.

    It applies the route's rule for remote candidates: where it takes none, a request's permit is ignored.
    """

    __slots__ = ("_only", "gate", "pool", "position", "takes_remote")

    def __init__(self, position: int, pool: Pool, only: Seat | None, *, takes_remote: bool) -> None:
        self.position = position
        self.pool = pool
        self.takes_remote = takes_remote
        self.gate = ""
        """What keeps the whole step from the current request, as text; empty: nothing."""
        self._only = only

    # -- selection

    def needs(self, needs: Needs) -> Needs:
        """Return the needs as they apply to the candidates of this step."""
        return replace(needs, allow_remote=False) if needs.allow_remote and not self.takes_remote else needs

    def choose(self, selector: Selector, wish: Wish) -> tuple[Seat, str] | None:
        """Select a free endpoint of this step, with the name of the policy; None: none is free for the request."""
        wish = self._allowed(wish)
        if self._only is None:
            return selector.choose(self.pool, wish)
        return (self._only, policy_name(self.pool)) if self._is_free(self._only.is_open, wish) else None

    def choose_ejected(self, wish: Wish) -> tuple[Seat, str] | None:
        """Select an endpoint of this step that only its ejection keeps from the request."""
        wish = self._allowed(wish)
        if self._only is None:
            return choose_ejected(self.pool, wish)
        return (self._only, policy_name(self.pool)) if self._is_free(self._only.is_spare, wish) else None

    def has_usable(self, wish: Wish) -> bool:
        """Whether a healthy endpoint of this step takes such requests, now or once it has a free slot."""
        wish = self._allowed(wish)
        if self._only is None:
            return self.pool.has_usable(wish)
        return self._only.is_usable and self._fits(wish)

    def has_free(self) -> bool:
        """Whether some endpoint of this step may be free, if only for some requests."""
        if self._only is None:
            return self.pool.has_free
        return not self.pool.is_at_its_cap and (self._only.is_open or self._only.is_spare)

    def permitted(self, needs: Needs, excluded: Collection[CandidateKey]) -> Iterator[Seat]:
        """Yield the endpoints of this step that meet the needs and are neither excluded nor down."""
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
        """Whether this step has a healthy endpoint other than this one."""
        if self._only is None:
            return self.pool.other_is_usable(seat)
        return self._only.is_usable and self._only is not seat

    # -- members

    def seats(self) -> Iterator[Seat]:
        """Yield the endpoints of this step."""
        return (seat for seat in self._all() if not self.leaves_out(seat))

    def stripped(self) -> Iterator[Seat]:
        """Yield the remote endpoints that the cluster's settings exclude from this step."""
        return (seat for seat in self._all() if self.leaves_out(seat))

    def some_seats(self, shelves: Sequence[Shelf], most: int) -> Iterable[Seat]:
        """Return some endpoints as `Pool.some_seats` does, excluded remote ones included."""
        return self.pool.some_seats(shelves, most) if self._only is None else (self._only,)

    def leaves_out(self, seat: Seat) -> bool:
        """Whether the cluster's settings exclude this endpoint from this step."""
        return seat.candidate.remote and not self.takes_remote

    def holds(self, seat: Seat) -> bool:
        """Whether the endpoint belongs to this step."""
        return seat.pool is self.pool and self._only in (None, seat)

    def count(self) -> int:
        """Number of endpoints, excluded remote ones included."""
        return len(self.pool.seats) if self._only is None else 1

    def up(self) -> int:
        """Number of endpoints that are not down."""
        if self._only is None:
            return self.pool.up
        return int(self._only.candidate.readiness is not Readiness.DOWN)

    def ready_slots(self) -> int:
        """Slots of the endpoints that are ready."""
        if self._only is None:
            return self.pool.ready_slots
        return self._only.candidate.slots if self._only.candidate.readiness is Readiness.READY else 0

    def in_flight(self) -> int:
        """Requests that run on the endpoints."""
        return self.pool.in_flight if self._only is None else self._only.in_flight

    def _allowed(self, wish: Wish) -> Wish:
        if self.takes_remote or not wish.needs.allow_remote:
            return wish
        return wish._replace(needs=self.needs(wish.needs))

    def _is_free(self, is_free: bool, wish: Wish) -> bool:
        return is_free and not self.pool.is_at_its_cap and self._fits(wish)

    def _fits(self, wish: Wish) -> bool:
        assert self._only is not None, "only a step with a single model is checked"
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
