"""Which candidates can serve a request, and which of them is selected.

Choosing, taking and releasing cost O(log n) in the candidates of a pool, times the few kinds of candidates in it.
"""

import itertools
from collections.abc import Collection, Iterator, Sequence

from router_svc.policy.arrival import Needs
from router_svc.policy.endpoints.candidates import Candidate, CandidateKey, Readiness
from router_svc.policy.endpoints.capability import GateSummary, summarize
from router_svc.policy.endpoints.choice import Choice, Considered, Wish
from router_svc.policy.endpoints.considered import Samples, consider, count_of, gate, score_of_chosen
from router_svc.policy.endpoints.endpoint_table import EndpointTable
from router_svc.policy.endpoints.health import Standing
from router_svc.policy.endpoints.health_monitor import HealthMonitor
from router_svc.policy.endpoints.pool import Seat
from router_svc.policy.endpoints.routes import PRIMARY, Rung
from router_svc.policy.endpoints.selection import Selector
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.settings import Settings


class CandidateIndex:
    """Selects candidates for requests and counts the slots that this router has granted them.

    Load is what this router granted; what runners report only breaks ties, since it is seconds old.
    """

    def __init__(self, settings: Settings, limits: SchedulerLimits) -> None:
        self.table = EndpointTable(settings, limits)
        self.health = HealthMonitor(self.table, limits)
        self.selector = Selector(max_sessions=limits.max_session_entries, max_prefixes=limits.max_prefix_entries)
        self._samples = Samples()
        self._numbers = itertools.count(1)
        self.total_in_flight = 0
        """Requests in flight over all candidates."""

    # -- what a queue has

    def up(self, line: str) -> int:
        """Number of members that are not down, those that the cluster's settings exclude from a mixed pool included."""
        return sum(rung.up() for rung in self.table.rungs(line))

    def ready_slots(self, line: str) -> int:
        """Slots of the members that are ready, counted as in `up`."""
        return sum(rung.ready_slots() for rung in self.table.rungs(line))

    def in_flight_of_line(self, line: str) -> int:
        """Requests on the members of a queue, whichever queue they came from; for a pool also on earlier members."""
        return sum(rung.in_flight() for rung in self.table.rungs(line))

    # -- selection

    def permitted(self, line: str, needs: Needs, excluded: Collection[CandidateKey]) -> Iterator[Candidate]:
        """Yield candidates that meet the needs and are neither excluded nor down; a route's in order."""
        return (seat.candidate for rung in self.table.rungs(line) for seat in rung.permitted(needs, excluded))

    def refusal(self, line: str, needs: Needs, name: str = "") -> GateSummary:
        """Explain why no candidate of a queue can serve such requests, for when `permitted` yields none.

        `name`: what the caller asked for; empty: the queue's name.
        """
        stripped = [seat.candidate for rung in self.table.rungs(line) for seat in rung.stripped()]
        return summarize(name or line, self.table.members(line), stripped, needs)

    def has_free(self, line: str) -> bool:
        """Whether some member may be free, if only for some requests, as of the latest `now`. False: none is."""
        pool = self.table.pools.get(line)
        return any(rung.has_free() for rung in self.table.rungs(line)) if pool is None else pool.has_free

    def choose(self, line: str, wish: Wish, now: float) -> Choice | None:
        """Select a free candidate for a request; None: no candidate is free for it.

        A choice is meant to be taken: its session and prompt prefixes are recorded as served there.
        """
        self.health.advance(now)
        rungs = self._rungs_for(line, wish)
        found = self._first_free(rungs, wish)
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
        """Return the candidates for a request with what keeps each from it, best first; of many only some."""
        self.health.advance(now)
        return consider(self._rungs_for(line, wish), wish, now)

    def unwell(self, line: str, wish: Wish, now: float) -> tuple[tuple[str, str], ...]:
        """Return the ready models with a free slot that get no request, each with the reason as text."""
        self.health.advance(now)
        unwell = {
            seat.candidate.model: why
            for rung in self._rungs_for(line, wish)
            for seat in rung.permitted(wish.needs, wish.excluded)
            if seat.candidate.readiness is Readiness.READY
            and not (seat.is_open or seat.is_full or seat.runner_is_full)
            and (why := gate(seat, wish, now))
        }
        return tuple(unwell.items())

    # -- load

    def take(self, candidate: Candidate, now: float) -> None:
        """Grant a slot of the candidate to a request."""
        self.health.advance(now)
        seat = self.table.seat(candidate.key)
        assert seat is not None, "only a candidate of the cluster can be granted"
        seat.in_flight += 1
        seat.runner.requests += 1
        seat.pool.in_flight += 1
        self.total_in_flight += 1
        seat.granted = next(self._numbers)
        seat.trying = not seat.is_usable and seat.health.standing is Standing.ON_TRIAL
        self.table.settle(seat)
        if seat.runner.requests in seat.runner.limits:
            self.table.settle_runner(seat.runner)

    def release(self, candidate: Candidate) -> None:
        """Return the slot of a request that ended."""
        seat = self.table.seat(candidate.key)
        assert seat is not None, "only a granted slot can be given back"
        assert seat.in_flight > 0, "only a granted slot can be given back"
        pool = seat.pool
        was_capped = pool.is_at_its_cap
        seat.in_flight -= 1
        seat.runner.requests -= 1
        pool.in_flight -= 1
        self.total_in_flight -= 1
        seat.trying = False
        self.table.settle(seat)
        if seat.runner.requests + 1 in seat.runner.limits:
            self.table.settle_runner(seat.runner)
        if was_capped and not pool.is_at_its_cap:
            self.table.note_cap_released(pool)
        if seat.shelf is None:
            self.table.forget_if_unused(seat)

    def in_flight(self, candidate: Candidate) -> int:
        """Requests on this candidate."""
        seat = self.table.seat(candidate.key)
        return 0 if seat is None else seat.in_flight

    def on_runner(self, candidate: Candidate) -> int:
        """Requests on all models of its runner incarnation."""
        runner = self.table.runner((candidate.runner, candidate.incarnation))
        return 0 if runner is None else runner.requests

    def _rungs_for(self, line: str, wish: Wish) -> Sequence[Rung]:
        """Return the steps of a queue; those after a pinned primary that can serve the request get a gate."""
        rungs = self.table.rungs(line)
        ladder = self.table.ladder(line)
        if ladder is None or not ladder.route.pin_primary or not rungs:
            return rungs
        first, others = rungs[0], rungs[1:]
        if first.position == PRIMARY and any(True for _ in first.permitted(wish.needs, wish.excluded)):
            for rung in others:
                rung.gate = f"{ladder.route.candidates[PRIMARY]} is waited for"
        return rungs

    def _first_free(self, rungs: Sequence[Rung], wish: Wish) -> tuple[Seat, str] | None:
        """Select from the first step that has a free endpoint; from ejected endpoints only where none is usable."""
        for rung in rungs:
            found = None if rung.gate else rung.choose(self.selector, wish)
            if found is not None:
                return found
        open_rungs = [rung for rung in rungs if not rung.gate]
        if any(rung.has_usable(wish) for rung in open_rungs):
            return None
        return next((found for rung in open_rungs if (found := rung.choose_ejected(wish)) is not None), None)
