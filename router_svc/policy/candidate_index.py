"""Who could serve a request and who is free for it: all candidates, by the lines of requests that wait for them.

A pool is a line; so is a route, whose members are those of its entries. Choosing, taking, giving back and one changed
candidate cost O(log n) in the candidates of a pool, times the few kinds of candidates in it (see choosing/shelf.py). A
runner with a limit over all its models costs as much as it has models each time it comes to the limit or leaves it.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from heapq import nsmallest

from router_svc.policy.arrival import ROUTE_PREFIX, Needs
from router_svc.policy.candidates import Candidate, Readiness
from router_svc.policy.capability import GateSummary, summarize
from router_svc.policy.choice import Choice, Considered, Wish
from router_svc.policy.choosing.considering import Samples, consider, count_of, gate, score_of_chosen
from router_svc.policy.choosing.pause_ends import PauseEnds
from router_svc.policy.choosing.pool import Affinities, Pool
from router_svc.policy.choosing.seats import RunnerLoad, Seat
from router_svc.policy.failover import FailureKind
from router_svc.policy.grants import CandidateKey, RunnerKey
from router_svc.policy.ladder import PRIMARY, Ladders, Rung
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.outliers import Health, Standing
from router_svc.policy.routes import Route
from router_svc.policy.settings import Settings


class CandidateIndex:
    """All candidates, and what this router has given them.

    Load is what this router granted; what runners report only decides among equals, since it is seconds old.
    """

    def __init__(self, settings: Settings, limits: SchedulerLimits) -> None:
        self._settings = settings
        self._limits = limits
        self._affinities = Affinities(
            max_sessions=limits.max_session_entries,
            max_prefixes=limits.max_prefix_entries,
            load_factor=limits.affinity_load_factor,
        )
        self._pools: dict[str, Pool] = {}
        self._pool_rungs: dict[str, tuple[Rung, ...]] = {}
        self._by_model: dict[str, Seat] = {}
        self._seats: dict[CandidateKey, Seat] = {}
        """Those in `_by_model`, and those that are gone and on which requests still run."""
        self._runners: dict[RunnerKey, RunnerLoad] = {}
        self._ladders = Ladders({}, cloud_fallback=False)
        self._held: dict[CandidateKey, str] = {}
        """Those who are held, each with the model that is to be loaded in its place."""
        self._ends = PauseEnds()
        self._samples = Samples()
        self._numbers = itertools.count(1)
        self._freed: dict[str, None] = {}
        """In an order that is the same each time."""
        self.total_in_flight = 0
        """All requests in flight."""

    # -- what there is

    def put(self, candidate: Candidate) -> None:
        """A candidate appeared or changed. A new incarnation of its runner starts with a clean record."""
        seat = self._by_model.get(candidate.model)
        if seat is not None and (seat.key != candidate.key or seat.candidate.pool != candidate.pool):
            self.drop(candidate.model)
            seat = None
        if seat is None:
            self._seat(candidate)
            return
        if seat.candidate == candidate:
            return
        seat.runner.change_limit(seat.candidate.runner_max_requests, candidate.runner_max_requests)
        seat.pool.change(seat, candidate)
        self._note_change(seat)

    def drop(self, model: str) -> None:
        """It is no longer in the mesh; requests that still run on it count until they are over."""
        seat = self._by_model.pop(model, None)
        if seat is None:
            return
        seat.pool.let_go(seat)
        del seat.runner.seats[seat.key]
        seat.runner.change_limit(seat.candidate.runner_max_requests, 0)
        self._note_change(seat)
        self._forget_if_over(seat)

    def set_ladders(self, routes: Mapping[str, Route], *, cloud_fallback: bool) -> None:
        """All routes, and whether they may fall back to candidates off the premises."""
        self._ladders = Ladders(routes, cloud_fallback=cloud_fallback)
        self._freed |= dict.fromkeys(self._ladders.lines)

    def line_of(self, target: str) -> str | None:
        """The line that a target stands for: a route, a pool, or the pool of a model; None: nothing is called so."""
        if target.startswith(ROUTE_PREFIX):
            return target if self._ladders.of(target) is not None else None
        if self._pool_called(target) is not None:
            return target
        seat = self._by_model.get(target)
        return None if seat is None else seat.candidate.pool

    def lines_of(self, candidate: Candidate) -> dict[str, None]:
        """The lines that it is a member of, by what is known of it now."""
        pool, model = candidate.pool, candidate.model
        if not self._ladders.lines:
            return {pool: None}
        names = (pool,) if model == pool or self._pool_called(model) is not None else (pool, model)
        return dict.fromkeys((pool, *self._ladders.lines_with(candidate, names)))

    def lines(self) -> Collection[str]:
        """All pools that have members, and all routes."""
        return [*(name for name, pool in self._pools.items() if pool.seats), *self._ladders.lines]

    def some_names(self, most: int) -> list[str]:
        """A few names that targets can have, for messages."""
        return nsmallest(most, {*self.lines(), *self._by_model})

    def members(self, line: str) -> Sequence[Candidate]:
        """Who is in a line, in the order of the ladder for a route; each once."""
        seats = (seat for rung in self._rungs(line) for seat in rung.seats())
        return [seat.candidate for seat in {seat.key: seat for seat in seats}.values()]

    def candidate(self, model: str) -> Candidate | None:
        """What is known of a model; None: it is not in the mesh."""
        seat = self._by_model.get(model)
        return None if seat is None else seat.candidate

    def up(self, line: str) -> int:
        """How many members are not down; those whom the mesh's settings leave out of a mixed pool among them."""
        return sum(rung.up() for rung in self._rungs(line))

    def ready_slots(self, line: str) -> int:
        """Slots of the members that are ready, counted as `up` does."""
        return sum(rung.ready_slots() for rung in self._rungs(line))

    # -- who can serve a request

    def permitted(self, line: str, needs: Needs, excluded: Collection[CandidateKey]) -> Iterator[Candidate]:
        """Those who have what is needed and are neither excluded nor down, lazily; a route's in its ladder's order."""
        return (seat.candidate for rung in self._rungs(line) for seat in rung.permitted(needs, excluded))

    def refusal(self, line: str, needs: Needs, name: str = "") -> GateSummary:
        """Why nobody of a line can serve such requests, for when `permitted` has nobody to name.

        `name`: what the caller called it; empty: the line's name.
        """
        rungs = self._rungs(line)
        stripped = [seat.candidate for rung in rungs for seat in rung.stripped()]
        return summarize(name or line, self.members(line), stripped, needs)

    def has_free(self, line: str) -> bool:
        """Whether somebody is free, if only for some requests, as of the latest `now`. False: surely nobody is."""
        pool = self._pools.get(line)
        return any(rung.has_free() for rung in self._rungs(line)) if pool is None else pool.has_free

    def choose(self, line: str, wish: Wish, now: float) -> Choice | None:
        """A free candidate for a request; None: nobody is free for it now.

        A choice is meant to be taken: sessions and beginnings of prompts are remembered to be there.
        """
        self.advance(now)
        rungs = self._rungs_for(line, wish)
        found = _first_free(rungs, wish)
        if found is None:
            return None
        seat, policy = found
        assert wish.needs.allow_remote or not seat.candidate.remote, "nothing leaves the premises without a permit"
        return Choice(
            candidate=seat.candidate,
            policy=policy,
            score=score_of_chosen(rungs, seat),
            others=self._samples.others(line, rungs, wish, now, seat),
            count=count_of(rungs),
        )

    def considered(self, line: str, wish: Wish, now: float) -> tuple[Considered, ...]:
        """Who could serve a request and what keeps each from it; the best first, of many only some."""
        self.advance(now)
        return consider(self._rungs_for(line, wish), wish, now)

    def unwell(self, line: str, wish: Wish, now: float) -> tuple[tuple[str, str], ...]:
        """Models that are ready, have a free slot, and get no request; with what keeps it from them, in words."""
        self.advance(now)
        unwell = {
            seat.candidate.model: why
            for rung in self._rungs_for(line, wish)
            for seat in rung.permitted(wish.needs, wish.excluded)
            if seat.candidate.readiness is Readiness.READY
            and not (seat.is_open or seat.is_full or seat.runner_is_full)
            and (why := gate(seat, wish, now))
        }
        return tuple(unwell.items())

    # -- what they were given

    def take(self, candidate: Candidate, now: float) -> None:
        """A request goes there."""
        self.advance(now)
        seat = self._seats[candidate.key]
        pool = seat.pool
        seat.in_flight += 1
        seat.runner.requests += 1
        pool.in_flight += 1
        self.total_in_flight += 1
        seat.granted = next(self._numbers)
        seat.trying = not seat.is_usable and seat.health.standing is Standing.ON_TRIAL
        self._settle(seat)
        if seat.runner.requests in seat.runner.limits:
            self._settle_runner(seat.runner)

    def release(self, candidate: Candidate) -> None:
        """A request that went there is over."""
        seat = self._seats[candidate.key]
        assert seat.in_flight > 0, "only a granted slot can be given back"
        pool = seat.pool
        was_capped = pool.is_at_its_cap
        seat.in_flight -= 1
        seat.runner.requests -= 1
        pool.in_flight -= 1
        self.total_in_flight -= 1
        seat.trying = False
        self._settle(seat)
        if seat.runner.requests + 1 in seat.runner.limits:
            self._settle_runner(seat.runner)
        if was_capped and not pool.is_at_its_cap:
            self._freed |= dict.fromkeys((pool.name, *self._ladders.lines))
        if seat.shelf is None:
            self._forget_if_over(seat)

    def in_flight(self, candidate: Candidate) -> int:
        """Requests on this candidate."""
        seat = self._seats.get(candidate.key)
        return 0 if seat is None else seat.in_flight

    def on_runner(self, candidate: Candidate) -> int:
        """Requests on all models of its runner incarnation."""
        runner = self._runners.get((candidate.runner, candidate.incarnation))
        return 0 if runner is None else runner.requests

    def in_flight_of_line(self, line: str) -> int:
        """Requests on its members, by whichever line they came; for a pool, on those who were its members too."""
        return sum(rung.in_flight() for rung in self._rungs(line))

    def hold(self, keys: frozenset[CandidateKey], instead: Mapping[CandidateKey, str] | None = None) -> None:
        """These take no new requests from now on, and nobody else is held.

        `instead`: the models that are to be loaded in their places, for those who ask.
        """
        words = instead or {}
        was, self._held = self._held, {key: words.get(key, "") for key in sorted(keys)}
        for key in dict.fromkeys((*was, *self._held)):
            seat = self._seats.get(key)
            if seat is not None and seat.held_for != self._held.get(key):
                seat.held_for = self._held.get(key)
                self._settle(seat)
                self._note_change(seat)

    # -- how they do

    def note_content(self, candidate: Candidate, now: float) -> None:
        """An answer from there has begun: it is not full, and it works."""
        self.advance(now)
        seat = self._seats.get(candidate.key)
        if seat is None:
            return
        health, standing = seat.health, seat.health.standing
        seat.pool.breaks_in_a_row = 0
        health.note_success(now)
        if health.standing is not standing:
            self._settle(seat)
            self._note_change(seat)

    def note_success(self, candidate: Candidate, now: float) -> None:
        """A request there ended well whose first content nobody told of."""
        self.note_content(candidate, now)

    def note_failure(self, candidate: Candidate, kind: FailureKind, now: float, *, had_begun: bool = False) -> None:
        """An attempt there failed like this; `had_begun`: after its first content."""
        self.advance(now)
        seat = self._seats.get(candidate.key)
        if seat is None:
            return
        seat.pool.breaks_in_a_row += kind is FailureKind.BROKE
        # What broke off is not tried again: without another one, a pause would make others wait for nothing.
        pauses = not had_begun or self._is_replaceable(seat)
        if seat.health.note_failure(kind, now, had_begun=had_begun, pauses=pauses) and self._is_replaceable(seat):
            seat.health.eject(now)
        self._ends.await_end(seat)
        self._settle(seat)
        self._note_change(seat)

    def note_shared_failure(self, candidate: Candidate, now: float) -> None:
        """An attempt failed with an error of the engine's own, as earlier ones of the same request did elsewhere.

        The request is what they have in common, so the candidate gets further requests at once, and none of it counts
        towards an ejection; but see `max_shared_failures`.
        """
        seat = self._seats.get(candidate.key)
        if seat is None:
            return
        if seat.health.excuses_shared_failure():
            seat.pool.breaks_in_a_row += 1
        else:
            self.note_failure(candidate, FailureKind.BROKE, now)

    def take_back_break(self, candidate: Candidate, now: float) -> None:
        """The last failure that was counted there is one that another candidate shared; see `note_shared_failure`."""
        self.advance(now)
        seat = self._seats.get(candidate.key)
        if seat is None or not seat.health.excuses_shared_failure():
            return
        seat.health.take_back_break(now)
        self._ends.await_end(seat)
        self._settle(seat)
        self._note_change(seat)

    def is_clean(self, candidate: Candidate, now: float) -> bool:
        """Whether a retry there is no repetition of what just went wrong.

        It succeeded since it last broke; or nothing broke there lately, and not all of its pool seems to break.
        """
        seat = self._seats.get(candidate.key)
        if seat is None or seat.health.has_proven_itself:
            return seat is not None
        is_outage = seat.pool.breaks_in_a_row >= self._limits.eject_after_failures
        return not is_outage and seat.health.has_not_failed_lately(now)

    def advance(self, now: float) -> None:
        """Time passed: pauses and ejections that are over end. Whoever takes a `now` does this first."""
        if now >= self._ends.first:
            for seat in self._ends.over(now):
                self._settle(seat)

    def wakes_at(self, now: float) -> float | None:
        """When the next pause or ejection ends, so that a choice may be possible again; None: there is none."""
        self.advance(now)
        return self._ends.next_end()

    def take_freed(self) -> Collection[str]:
        """The lines in which somebody may have come free since this was asked last, for whatever reason."""
        freed, self._freed = self._freed, {}
        return freed

    # -- inside

    def _rungs(self, line: str) -> Sequence[Rung]:
        """What a line is made of, best first; nothing where there is no such line."""
        rungs = self._pool_rungs.get(line)
        if rungs is not None:
            return rungs
        ladder = self._ladders.of(line)
        return () if ladder is None else list(ladder.rungs(self._pool_called, self._by_model.get))

    def _pool_called(self, name: str) -> Pool | None:
        pool = self._pools.get(name)
        return pool if pool is not None and pool.seats else None

    def _rungs_for(self, line: str, wish: Wish) -> Sequence[Rung]:
        """The rungs of a line, with a gate before those that wait for a pinned primary."""
        rungs = self._rungs(line)
        ladder = None if line in self._pools else self._ladders.of(line)
        if ladder is None or not ladder.route.pin_primary or not rungs:
            return rungs
        first, others = rungs[0], rungs[1:]
        if first.position == PRIMARY and any(True for _ in first.permitted(wish.needs, wish.excluded)):
            for rung in others:
                rung.gate = f"{ladder.route.candidates[PRIMARY]} is waited for"
        return rungs

    def _seat(self, candidate: Candidate) -> None:
        """Give it a place; the one that it had, where requests still run on it."""
        pool = self._pools.get(candidate.pool)
        if pool is None:
            pool = self._pools[candidate.pool] = Pool(
                candidate.pool, self._settings.pool(candidate.pool), self._affinities
            )
            self._pool_rungs[pool.name] = (Rung(PRIMARY, pool, None, takes_remote=True),)
        seat = self._seats.get(candidate.key)
        if seat is None:
            runner = self._runners.setdefault(candidate.key[1:], RunnerLoad(candidate.key[1:]))
            seat = self._seats[candidate.key] = Seat(candidate, pool, runner, Health(self._limits))
        elif seat.pool is not pool:
            seat.pool.in_flight -= seat.in_flight
            pool.in_flight += seat.in_flight
            self._forget_pool_if_over(seat.pool)
            seat.pool = pool
        seat.candidate = candidate
        seat.held_for = self._held.get(candidate.key)
        seat.runner.seats[seat.key] = seat
        seat.runner.change_limit(0, candidate.runner_max_requests)
        self._by_model[candidate.model] = seat
        pool.take_in(seat)
        self._note_change(seat)

    def _forget_if_over(self, seat: Seat) -> None:
        """A seat is kept while its candidate is in the mesh or requests run on it."""
        if seat.in_flight or seat.shelf is not None:
            return
        del self._seats[seat.key]
        if not seat.runner.requests and not seat.runner.seats:
            del self._runners[seat.runner.key]
        self._forget_pool_if_over(seat.pool)

    def _forget_pool_if_over(self, pool: Pool) -> None:
        if not pool.seats and not pool.in_flight:
            del self._pools[pool.name], self._pool_rungs[pool.name]

    def _settle(self, seat: Seat) -> None:
        """Its load or its health changed."""
        if seat.shelf is not None and seat.shelf.put(seat):
            self._freed |= self.lines_of(seat.candidate)

    def _settle_runner(self, runner: RunnerLoad) -> None:
        """It came to the limit over all its models, or left it."""
        for seat in runner.seats.values():
            self._settle(seat)

    def _note_change(self, seat: Seat) -> None:
        """It may be free, or the ejected ones of its pool may be needed."""
        if seat.is_open or seat.is_spare or seat.pool.has_spare:
            self._freed |= self.lines_of(seat.candidate)

    def _is_replaceable(self, seat: Seat) -> bool:
        """Whether in all of its lines somebody else works."""
        return seat.shelf is not None and all(
            any(rung.has_other_usable(seat) for rung in self._rungs(line)) for line in self.lines_of(seat.candidate)
        )


def _first_free(rungs: Sequence[Rung], wish: Wish) -> tuple[Seat, str] | None:
    """The first rung that has somebody free; who is ejected only where nobody works."""
    for rung in rungs:
        found = None if rung.gate else rung.choose(wish)
        if found is not None:
            return found
    asked = [rung for rung in rungs if not rung.gate]
    if any(rung.has_usable(wish) for rung in asked):
        return None
    return next((found for rung in asked if (found := rung.choose_ejected(wish)) is not None), None)
