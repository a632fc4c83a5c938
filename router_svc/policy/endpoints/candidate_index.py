"""Which candidates can serve a request, and which of them is selected.

Choosing, taking and releasing cost O(log n) in the candidates of a pool, times the few kinds of candidates in it.
"""

import itertools
from collections.abc import Collection, Iterator, Sequence

from router_svc.policy.arrival import Needs
from router_svc.policy.endpoints.candidates import Candidate, CandidateKey, Readiness
from router_svc.policy.endpoints.capability import GateSummary, summarize
from router_svc.policy.endpoints.choice import Choice, Considered, PickRequest
from router_svc.policy.endpoints.considered import ConsideredSamples, consider, count_of, gate, score_of_chosen
from router_svc.policy.endpoints.endpoint_table import EndpointTable
from router_svc.policy.endpoints.health import HealthState
from router_svc.policy.endpoints.health_monitor import HealthMonitor
from router_svc.policy.endpoints.pool import Endpoint
from router_svc.policy.endpoints.routes import PRIMARY, RouteStep
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
        self._samples = ConsideredSamples()
        self._numbers = itertools.count(1)
        self.total_in_flight = 0
        """Requests in flight over all candidates."""

    # -- what a queue has

    def up(self, queue: str) -> int:
        """Number of members that are not down, those that the mesh's settings exclude from a mixed pool included."""
        return sum(step.up() for step in self.table.steps(queue))

    def ready_slots(self, queue: str) -> int:
        """Slots of the members that are ready, counted as in `up`."""
        return sum(step.ready_slots() for step in self.table.steps(queue))

    def in_flight_of_queue(self, queue: str) -> int:
        """Requests on the members of a queue, whichever queue they came from; for a pool also on earlier members."""
        return sum(step.in_flight() for step in self.table.steps(queue))

    # -- selection

    def permitted(self, queue: str, needs: Needs, excluded: Collection[CandidateKey]) -> Iterator[Candidate]:
        """Yield candidates that meet the needs and are neither excluded nor down; a route's in order."""
        return (endpoint.candidate for step in self.table.steps(queue) for endpoint in step.permitted(needs, excluded))

    def refusal(self, queue: str, needs: Needs, name: str = "") -> GateSummary:
        """Explain why no candidate of a queue can serve such requests, for when `permitted` yields none.

        `name`: what the caller asked for; empty: the queue's name.
        """
        stripped = [endpoint.candidate for step in self.table.steps(queue) for endpoint in step.stripped()]
        return summarize(name or queue, self.table.members(queue), stripped, needs)

    def has_free(self, queue: str) -> bool:
        """Whether some member may be free, if only for some requests, as of the latest `now`. False: none is."""
        pool = self.table.pools.get(queue)
        return any(step.has_free() for step in self.table.steps(queue)) if pool is None else pool.has_free

    def choose(self, queue: str, pick: PickRequest, now: float) -> Choice | None:
        """Select a free candidate for a request; None: no candidate is free for it.

        A choice is meant to be taken: its session and prompt prefixes are recorded as served there.
        """
        self.health.advance(now)
        steps = self._steps_for(queue, pick)
        found = self._first_free(steps, pick)
        if found is None:
            return None
        endpoint, policy = found
        assert pick.needs.allow_remote or not endpoint.candidate.remote, "nothing leaves the premises without a permit"
        return Choice(
            candidate=endpoint.candidate,
            policy=policy,
            score=score_of_chosen(steps, endpoint),
            others=self._samples.others(queue, steps, pick, now, endpoint),
            count=count_of(steps),
        )

    def considered(self, queue: str, pick: PickRequest, now: float) -> tuple[Considered, ...]:
        """Return the candidates for a request with what keeps each from it, best first; of many only some."""
        self.health.advance(now)
        return consider(self._steps_for(queue, pick), pick, now)

    def unhealthy(self, queue: str, pick: PickRequest, now: float) -> tuple[tuple[str, str], ...]:
        """Return the ready models with a free slot that get no request, each with the reason as text."""
        self.health.advance(now)
        unhealthy = {
            endpoint.candidate.model: why
            for step in self._steps_for(queue, pick)
            for endpoint in step.permitted(pick.needs, pick.excluded)
            if endpoint.candidate.readiness is Readiness.READY
            and not (endpoint.is_open or endpoint.is_full or endpoint.runner_is_full)
            and (why := gate(endpoint, pick, now))
        }
        return tuple(unhealthy.items())

    # -- load

    def take(self, candidate: Candidate, now: float) -> None:
        """Grant a slot of the candidate to a request."""
        self.health.advance(now)
        endpoint = self.table.by_key[candidate.key]
        endpoint.in_flight += 1
        endpoint.runner.requests += 1
        endpoint.pool.in_flight += 1
        self.total_in_flight += 1
        endpoint.granted = next(self._numbers)
        endpoint.trying = not endpoint.is_usable and endpoint.health.state is HealthState.ON_TRIAL
        self.table.settle(endpoint)
        if endpoint.runner.requests in endpoint.runner.limits:
            self.table.settle_runner(endpoint.runner)

    def release(self, candidate: Candidate) -> None:
        """Return the slot of a request that ended."""
        endpoint = self.table.by_key[candidate.key]
        assert endpoint.in_flight > 0, "only a granted slot can be given back"
        pool = endpoint.pool
        was_capped = pool.is_at_its_cap
        endpoint.in_flight -= 1
        endpoint.runner.requests -= 1
        pool.in_flight -= 1
        self.total_in_flight -= 1
        endpoint.trying = False
        self.table.settle(endpoint)
        if endpoint.runner.requests + 1 in endpoint.runner.limits:
            self.table.settle_runner(endpoint.runner)
        if was_capped and not pool.is_at_its_cap:
            self.table.note_cap_released(pool)
        if endpoint.group is None:
            self.table.forget_if_unused(endpoint)

    def in_flight(self, candidate: Candidate) -> int:
        """Requests on this candidate."""
        endpoint = self.table.by_key.get(candidate.key)
        return 0 if endpoint is None else endpoint.in_flight

    def on_runner(self, candidate: Candidate) -> int:
        """Requests on all models of its runner incarnation."""
        runner = self.table.runner((candidate.runner, candidate.incarnation))
        return 0 if runner is None else runner.requests

    def _steps_for(self, queue: str, pick: PickRequest) -> Sequence[RouteStep]:
        """Return the steps of a queue; those after a pinned primary that can serve the request get a gate."""
        steps = self.table.steps(queue)
        resolved = None if queue in self.table.pools else self.table.resolved(queue)
        if resolved is None or not resolved.route.pin_primary or not steps:
            return steps
        first, others = steps[0], steps[1:]
        if first.position == PRIMARY and any(True for _ in first.permitted(pick.needs, pick.excluded)):
            for step in others:
                step.gate = f"{resolved.route.candidates[PRIMARY]} is waited for"
        return steps

    def _first_free(self, steps: Sequence[RouteStep], pick: PickRequest) -> tuple[Endpoint, str] | None:
        """Select from the first step that has a free endpoint; from ejected endpoints only where none is usable."""
        for step in steps:
            found = None if step.gate else step.choose(self.selector, pick)
            if found is not None:
                return found
        open_steps = [step for step in steps if not step.gate]
        if any(step.has_usable(pick) for step in open_steps):
            return None
        return next((found for step in open_steps if (found := step.choose_ejected(pick)) is not None), None)
