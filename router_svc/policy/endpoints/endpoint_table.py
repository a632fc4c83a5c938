"""All endpoints by model, runner, pool and queue.

A pool is a queue of requests; so is a route, whose members are those of its steps. Adding, changing and removing one
candidate costs O(log n) in the candidates of its pool. A runner with a request limit over all its models costs time in
proportion to its models each time it reaches the limit or leaves it.
"""

from collections.abc import Collection, Mapping, Sequence
from heapq import nsmallest

from router_svc.policy.arrival import ROUTE_PREFIX
from router_svc.policy.endpoints.candidates import Candidate, CandidateKey, RunnerKey
from router_svc.policy.endpoints.health import Health
from router_svc.policy.endpoints.pool import Pool, RunnerLoad, Seat
from router_svc.policy.endpoints.routes import PRIMARY, Ladder, Ladders, Route, Rung
from router_svc.policy.endpoints.selection import rank_for
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.settings import Settings


class EndpointTable:
    """Keeps every candidate of the cluster in its pool, with what this router has granted it."""

    def __init__(self, settings: Settings, limits: SchedulerLimits) -> None:
        self._settings = settings
        self._limits = limits
        self.pools: dict[str, Pool] = {}
        """By name; only to be read."""
        self._pool_rungs: dict[str, tuple[Rung, ...]] = {}
        self._by_model: dict[str, Seat] = {}
        self._seats: dict[CandidateKey, Seat] = {}
        """Those in `_by_model`, and those that left the cluster and on which requests still run."""
        self._runners: dict[RunnerKey, RunnerLoad] = {}
        self._ladders = Ladders({}, cloud_fallback=False)
        self._held: dict[CandidateKey, str] = {}
        """Held endpoints, each with the model that is to be loaded in its place."""
        self._freed: dict[str, None] = {}
        """Queues with an endpoint that may have become free; ordered, so that runs are reproducible."""

    # -- membership

    def put(self, candidate: Candidate) -> None:
        """Add or update a candidate. A new incarnation of its runner starts with a clean health record."""
        seat = self._by_model.get(candidate.model)
        if seat is not None and (seat.key != candidate.key or seat.candidate.pool != candidate.pool):
            self.drop(candidate.model)
            seat = None
        if seat is None:
            self._add(candidate)
            return
        if seat.candidate == candidate:
            return
        seat.runner.change_limit(seat.candidate.runner_max_requests, candidate.runner_max_requests)
        seat.pool.change(seat, candidate)
        self.note_change(seat)

    def drop(self, model: str) -> None:
        """Remove a model; requests that still run on it count until they end."""
        seat = self._by_model.pop(model, None)
        if seat is None:
            return
        seat.pool.remove(seat)
        del seat.runner.seats[seat.key]
        seat.runner.change_limit(seat.candidate.runner_max_requests, 0)
        self.note_change(seat)
        self.forget_if_unused(seat)

    def set_ladders(self, routes: Mapping[str, Route], *, cloud_fallback: bool) -> None:
        """Replace all routes. `cloud_fallback`: whether they may fall back to candidates off the premises."""
        self._ladders = Ladders(routes, cloud_fallback=cloud_fallback)
        self._freed |= dict.fromkeys(self._ladders.lines)

    def hold(self, keys: frozenset[CandidateKey], instead: Mapping[CandidateKey, str] | None = None) -> None:
        """Hold exactly these endpoints: they take no new requests.

        `instead`: the models that are to be loaded in their places, for explanations.
        """
        models = instead or {}
        was, self._held = self._held, {key: models.get(key, "") for key in sorted(keys)}
        for key in dict.fromkeys((*was, *self._held)):
            seat = self._seats.get(key)
            if seat is not None and seat.held_for != self._held.get(key):
                seat.held_for = self._held.get(key)
                self.settle(seat)
                self.note_change(seat)

    # -- lookup

    def line_of(self, target: str) -> str | None:
        """Return the queue of a target: a route, a pool, or the pool of a model; None: the name is unknown."""
        if target.startswith(ROUTE_PREFIX):
            return target if self._ladders.of(target) is not None else None
        if self._pool_called(target) is not None:
            return target
        seat = self._by_model.get(target)
        return None if seat is None else seat.candidate.pool

    def lines_of(self, candidate: Candidate) -> dict[str, None]:
        """Return the queues that a candidate serves, by its current description."""
        pool, model = candidate.pool, candidate.model
        if not self._ladders.lines:
            return {pool: None}
        names = (pool,) if model == pool or self._pool_called(model) is not None else (pool, model)
        return dict.fromkeys((pool, *self._ladders.lines_with(candidate, names)))

    def lines(self) -> Collection[str]:
        """Return the names of all pools with a member and of all routes."""
        return [*(name for name, pool in self.pools.items() if pool.seats), *self._ladders.lines]

    def some_names(self, most: int) -> list[str]:
        """Return the first of the names that requests may ask for, in alphabetical order."""
        return nsmallest(most, {*self.lines(), *self._by_model})

    def members(self, line: str) -> Sequence[Candidate]:
        """Return the candidates of a queue, each once; those of a route in the order of its steps."""
        seats = (seat for rung in self.rungs(line) for seat in rung.seats())
        return [seat.candidate for seat in {seat.key: seat for seat in seats}.values()]

    def candidate(self, model: str) -> Candidate | None:
        """Return what is known of a model; None: it is not in the cluster."""
        seat = self._by_model.get(model)
        return None if seat is None else seat.candidate

    def seat(self, key: CandidateKey) -> Seat | None:
        """Return the endpoint of a candidate, also of one that left the cluster while requests run on it."""
        return self._seats.get(key)

    def runner(self, key: RunnerKey) -> RunnerLoad | None:
        """Return the load of a runner incarnation; None: it has no candidate and no request."""
        return self._runners.get(key)

    def rungs(self, line: str) -> Sequence[Rung]:
        """Return the steps of a queue, best first: one for a pool; empty where there is no such queue."""
        rungs = self._pool_rungs.get(line)
        if rungs is not None:
            return rungs
        ladder = self._ladders.of(line)
        return () if ladder is None else list(ladder.rungs(self._pool_called, self._by_model.get))

    def ladder(self, line: str) -> Ladder | None:
        """Return the route of a queue; None: it is a pool's."""
        return None if line in self.pools else self._ladders.of(line)

    # -- changes of load and health

    def settle(self, seat: Seat) -> None:
        """Reorder an endpoint whose load or health changed."""
        if seat.shelf is not None and seat.shelf.put(seat):
            self._freed |= self.lines_of(seat.candidate)

    def settle_runner(self, runner: RunnerLoad) -> None:
        """Reorder the endpoints of a runner that reached its request limit or left it."""
        for seat in runner.seats.values():
            self.settle(seat)

    def note_change(self, seat: Seat) -> None:
        """Mark the queues of a changed endpoint: it may be free, or the ejected ones of its pool may be needed."""
        if seat.is_open or seat.is_spare or seat.pool.has_spare:
            self._freed |= self.lines_of(seat.candidate)

    def note_cap_released(self, pool: Pool) -> None:
        """Mark the queues of a pool that is no longer at its concurrency cap."""
        self._freed |= dict.fromkeys((pool.name, *self._ladders.lines))

    def take_freed(self) -> Collection[str]:
        """Return the queues with an endpoint that may have become free since the last call."""
        freed, self._freed = self._freed, {}
        return freed

    def forget_if_unused(self, seat: Seat) -> None:
        """Forget an endpoint that left the cluster and on which no request runs."""
        if seat.in_flight or seat.shelf is not None:
            return
        del self._seats[seat.key]
        if not seat.runner.requests and not seat.runner.seats:
            del self._runners[seat.runner.key]
        self._forget_pool_if_unused(seat.pool)

    def _pool_called(self, name: str) -> Pool | None:
        pool = self.pools.get(name)
        return pool if pool is not None and pool.seats else None

    def _add(self, candidate: Candidate) -> None:
        """Add an endpoint for a candidate, or reuse the one on which requests of an earlier membership still run."""
        pool = self.pools.get(candidate.pool)
        if pool is None:
            settings = self._settings.pool(candidate.pool)
            pool = self.pools[candidate.pool] = Pool(
                candidate.pool, settings, rank_for(settings.policy), self._limits.affinity_load_factor
            )
            self._pool_rungs[pool.name] = (Rung(PRIMARY, pool, None, takes_remote=True),)
        seat = self._seats.get(candidate.key)
        if seat is None:
            runner = self._runners.setdefault(candidate.key[1:], RunnerLoad(candidate.key[1:]))
            seat = self._seats[candidate.key] = Seat(candidate, pool, runner, Health(self._limits))
        elif seat.pool is not pool:
            seat.pool.in_flight -= seat.in_flight
            pool.in_flight += seat.in_flight
            self._forget_pool_if_unused(seat.pool)
            seat.pool = pool
        seat.candidate = candidate
        seat.held_for = self._held.get(candidate.key)
        seat.runner.seats[seat.key] = seat
        seat.runner.change_limit(0, candidate.runner_max_requests)
        self._by_model[candidate.model] = seat
        pool.add(seat)
        self.note_change(seat)

    def _forget_pool_if_unused(self, pool: Pool) -> None:
        if not pool.seats and not pool.in_flight:
            del self.pools[pool.name], self._pool_rungs[pool.name]
