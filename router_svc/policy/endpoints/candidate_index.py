"""Which candidates can serve a request, and which one is selected.

Selecting, taking and releasing cost O(log n) in the candidates of a pool, times the few kinds of candidates in it.

`HealthMonitor` decides what results of attempts mean for endpoints, and ends pauses and ejections; the state of one
endpoint is in `circuit_breaker`.
"""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count
from math import inf

from router_svc.policy.endpoints.candidates import Candidate, CandidateKey, Needs, Readiness
from router_svc.policy.endpoints.choice import Choice, Considered, PickRequest
from router_svc.policy.endpoints.circuit_breaker import HealthState
from router_svc.policy.endpoints.endpoint_table import EndpointTable
from router_svc.policy.endpoints.engine_load import NO_ENGINE_LOAD, EngineFigures, EngineLoad, engine_load
from router_svc.policy.endpoints.explanation import ConsideredSamples, consider, count_of, gate, score_of_chosen
from router_svc.policy.endpoints.load_balancer import Ahead, BestEndpoint, Selection, Selector
from router_svc.policy.endpoints.pool import Endpoint
from router_svc.policy.endpoints.required_capabilities import GateSummary, summarize
from router_svc.policy.endpoints.routes import PRIMARY, RouteStep
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.pool_settings import ChoicePolicy, Settings
from weft.kernel.errors.failover import FailureKind
from weft.kernel.errors.reasons import Reason

MAX_REMEMBERED_SESSIONS = 65_536
"""Sessions whose last runner is remembered; the least recently used is dropped first."""


class CandidateIndex:
    """Selects candidates for requests and counts the slots that this router has granted them.

    Load is what this router granted plus what engine figures add (`engine_load`). Slots that runners report in use are
    seconds old: they only break ties and reveal requests that this router cannot have granted (`EngineSlots`).
    """

    def __init__(self, settings: Settings, limits: SchedulerLimits) -> None:
        self.table = EndpointTable(settings, limits)
        self.health = HealthMonitor(self.table, limits)
        self.figures = EngineFigureAges(self.table, limits)
        self.selector = Selector(max_sessions=MAX_REMEMBERED_SESSIONS, max_prefixes=limits.max_prefix_entries)
        self._samples = ConsideredSamples()
        self._grants = 0
        self.total_in_flight = 0

    # -- what a queue has

    def in_flight_of_queue(self, queue: str) -> int:
        """Requests on the members of a queue, from any queue; for a pool also on earlier members."""
        return sum(step.in_flight() for step in self.table.steps(queue))

    # -- selection

    def permitted(self, queue: str, needs: Needs, excluded: Collection[CandidateKey]) -> Iterator[Candidate]:
        """Yield candidates that meet the needs and are neither excluded nor down; for a route in its order."""
        return (endpoint.candidate for step in self.table.steps(queue) for endpoint in step.permitted(needs, excluded))

    def refusal(self, queue: str, needs: Needs, name: str = "") -> GateSummary:
        """Explain why no candidate of a queue can serve such requests, if `permitted` yields none.

        `name`: the target that the caller requested; empty: the queue's name.
        """
        steps = [step for step in self.table.steps(queue) if not step.skip(needs)]
        resolved, why_not = self.table.resolved(queue), dict(needs.skipped)
        numbered = enumerate(() if steps or resolved is None else resolved.route.candidates, 1)
        if reasons := "; ".join(f"candidate {number} {why_not[each]}" for number, each in numbered if each in why_not):
            message = f"no candidate of {name or queue} accepts the request: {reasons}"
            return GateSummary(reason=Reason.NO_RUNNER_AVAILABLE, message=message, gates={})
        stripped = [endpoint.candidate for step in steps for endpoint in step.stripped()]
        members = {endpoint.key: endpoint.candidate for step in steps for endpoint in step.labeled()}
        if not members and (labels := {label for step in steps for label in step.labels}):
            message = (
                f"no candidate of {name or queue} has the label {', '.join(sorted(labels))} that a condition requires"
            )
            return GateSummary(reason=Reason.NO_RUNNER_AVAILABLE, message=message, gates={})
        return summarize(name or queue, members.values(), stripped, needs)

    def is_out_of_reach(self, queue: str, needs: Needs) -> bool:
        """Whether no member that such requests may use can be reached."""
        members = [endpoint for step in self.table.steps(queue) for endpoint in step.permitted(needs, ())]
        return bool(members) and all(endpoint.health.is_lost and not endpoint.in_flight for endpoint in members)

    def has_free(self, queue: str) -> bool:
        """Whether a member may be free, at least for some requests, as of the latest `now`."""
        pool = self.table.pools.get(queue)
        return any(step.has_free() for step in self.table.steps(queue)) if pool is None else pool.has_free

    def free_endpoints(self, queue: str, pick: PickRequest, most: int) -> Iterator[Endpoint]:
        """Yield endpoints with a free slot for a request, at most `most` of each kind in a step."""
        for step in self._steps_for(queue, pick):
            if not step.gate:
                yield from step.free_endpoints(pick.needs, pick.excluded, most)

    def awaits_prompts(self, queue: str) -> bool:
        """Whether requests of a queue may wait for one of its members while another is free."""
        pool = self.table.pools.get(queue)
        return pool is not None and pool.settings.policy is ChoicePolicy.FIRST_TOKEN

    def takes_prompts(self, queue: str, now: float) -> bool:
        """Whether a member may be free for waiting requests."""
        pool = self.table.pools.get(queue)
        if pool is None or pool.settings.policy is not ChoicePolicy.FIRST_TOKEN:
            return self.has_free(queue)
        return not pool.is_at_its_cap and pool.takes_prompts(now)

    def taking_prompts(self, queue: str, now: float) -> list[Endpoint]:
        """Return the members of a pool that take a prompt now."""
        return self.table.pools[queue].taking_prompts(now)

    def best(self, queue: str, pick: PickRequest, now: float, ahead: Ahead) -> BestEndpoint | None:
        """Return the best member of a pool for a request, free or not; None: there is none."""
        self.health.advance(now)
        self.figures.advance(now)
        pool = self.table.pools[queue]
        return None if pool.is_at_its_cap else self.selector.best(pool, pick, now, ahead)

    def choose(self, queue: str, pick: PickRequest, now: float) -> Choice | None:
        """Select a free candidate for a request; None: none is free for it. The caller must take the choice."""
        self.health.advance(now)
        self.figures.advance(now)
        found = self._first_free(self._steps_for(queue, pick), pick, now)
        return None if found is None else self.choice_of(queue, pick, found, now)

    def choice_of(self, queue: str, pick: PickRequest, found: Selection, now: float) -> Choice:
        """Return the choice of a selection. The caller must take it: it is recorded as served there."""
        endpoint = found.endpoint
        assert pick.needs.allow_remote or not endpoint.candidate.remote, "the request does not allow remote models"
        self.selector.note_taken(endpoint.pool, pick, found, now)
        steps = self._steps_for(queue, pick)
        number = count_of(steps)
        return Choice(
            candidate=endpoint.candidate,
            policy=found.policy,
            score=score_of_chosen(steps, endpoint),
            others=self._samples.others(queue, steps, pick, now, endpoint) if number > 1 else (),
            count=number,
            engine_load=endpoint.engine_load.explanation(endpoint.candidate.slots),
            expected=found.expected.get(endpoint.key),
            times=found.expected,
        )

    def considered(self, queue: str, pick: PickRequest, now: float) -> tuple[Considered, ...]:
        """Return candidates for a request and why each cannot take it, best first; a sample if there are many."""
        self.health.advance(now)
        self.figures.advance(now)
        return consider(self._steps_for(queue, pick), pick, now)

    def unhealthy(self, queue: str, pick: PickRequest, now: float) -> tuple[tuple[str, str], ...]:
        """Return the ready models with a free slot that get no requests, each with the reason as text."""
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

    def take(self, candidate: Candidate) -> None:
        """Grant a slot of a candidate that was chosen now."""
        endpoint = self.table.by_key[candidate.key]
        endpoint.in_flight += 1
        endpoint.engine_slots.requests += 1
        endpoint.engine_slots.granted += 1
        endpoint.runner.requests += 1
        endpoint.pool.in_flight += 1
        self.total_in_flight += 1
        self._grants += 1
        endpoint.granted = self._grants
        endpoint.trying = not endpoint.is_usable and endpoint.health.state is HealthState.ON_TRIAL
        self.table.settle_engine(endpoint)
        if endpoint.runner.requests in endpoint.runner.limits:
            self.table.settle_runner(endpoint.runner)

    def release(self, candidate: Candidate) -> None:
        """Release the slot of a request that ended."""
        endpoint = self.table.by_key[candidate.key]
        assert endpoint.in_flight > 0, "only a granted slot can be given back"
        pool = endpoint.pool
        was_capped = pool.is_at_its_cap
        endpoint.in_flight -= 1
        endpoint.engine_slots.requests -= 1
        endpoint.runner.requests -= 1
        pool.in_flight -= 1
        self.total_in_flight -= 1
        endpoint.trying = False
        self.table.settle_engine(endpoint)
        if endpoint.runner.requests + 1 in endpoint.runner.limits:
            self.table.settle_runner(endpoint.runner)
        if was_capped and not pool.is_at_its_cap:
            self.table.note_cap_released(pool)
        if endpoint.group is None:
            self.table.forget_if_unused(endpoint)

    def add_prompt(self, candidate: Candidate, tokens: float, seconds: float, now: float) -> None:
        """Add a prompt to an engine's line: the tokens and time that it takes; 0 seconds: unknown."""
        endpoint = self.table.by_key[candidate.key]
        slots = endpoint.engine_slots
        # A cloud has more than one engine.
        if not candidate.remote:
            slots.line.add(seconds, now, is_first=not slots.owed_tokens)
        endpoint.pool.prefilling += endpoint.owed_tokens <= 0 < tokens
        endpoint.owed_tokens += tokens
        slots.owed_tokens += tokens

    def end_prompt(self, candidate: Candidate, tokens: float, now: float) -> float:
        """Remove a prompt that is processed, or whose request has ended.

        Returns how long its engine took for it; infinity: no longer than since it was placed.
        """
        endpoint = self.table.by_key.get(candidate.key)
        if endpoint is None:
            return inf
        was, slots = endpoint.owed_tokens > 0, endpoint.engine_slots
        # Rounding may leave a little less than nothing.
        endpoint.owed_tokens = max(0.0, endpoint.owed_tokens - tokens)
        slots.owed_tokens = max(0.0, slots.owed_tokens - tokens)
        endpoint.pool.prefilling += (endpoint.owed_tokens > 0) - was
        if candidate.remote:
            return inf
        _, per_token = self.selector.speeds.of(candidate, now).prefill()
        return slots.line.advance(slots.owed_tokens * per_token, now)

    def in_flight(self, candidate: Candidate) -> int:
        """Return the requests on this candidate."""
        endpoint = self.table.by_key.get(candidate.key)
        return 0 if endpoint is None else endpoint.in_flight

    def on_runner(self, candidate: Candidate) -> int:
        """Return the requests on all models of its runner incarnation."""
        runner = self.table.runner((candidate.runner, candidate.incarnation))
        return 0 if runner is None else runner.requests

    def _steps_for(self, queue: str, pick: PickRequest) -> Sequence[RouteStep]:
        """Return the steps of a queue; those that exclude the request, or follow a pinned primary, get a gate."""
        steps = self.table.steps(queue)
        if pick.needs.skipped:
            for step in steps:
                step.gate = step.skip(pick.needs)
        resolved = None if queue in self.table.pools else self.table.resolved(queue)
        if resolved is None or not resolved.route.pin_primary or not steps:
            return steps
        first, others = steps[0], steps[1:]
        if first.position == PRIMARY and any(True for _ in first.permitted(pick.needs, pick.excluded)):
            for step in others:
                step.gate = step.gate or f"{resolved.route.candidates[PRIMARY]} is waited for"
        return steps

    def _first_free(self, steps: Sequence[RouteStep], pick: PickRequest, now: float) -> Selection | None:
        """Select from the first step with a free endpoint; use ejected endpoints only if none is usable."""
        for step in steps:
            found = None if step.gate else step.choose(self.selector, pick, now)
            if found is not None:
                return found
        open_steps = [step for step in steps if not step.gate]
        if any(step.has_usable(pick) for step in open_steps):
            return None
        return next((found for step in open_steps if (found := step.choose_ejected(pick)) is not None), None)


class EngineFigureAges:
    """Applies engine figures to their endpoints, and revokes figures that are too old."""

    def __init__(self, table: EndpointTable, limits: SchedulerLimits) -> None:
        self._table = table
        self._limit_seconds = limits.engine_figures_seconds
        self._ends: deque[tuple[float, Endpoint, EngineFigures]] = deque()
        """Ordered by expiry, since all figures expire after the same time."""

    def note(self, candidate: Candidate, now: float) -> None:
        """Apply a candidate's figures. A sample that was seen before does not extend their lifetime."""
        endpoint = self._table.by_key.get(candidate.key)
        if endpoint is None or endpoint.engine == candidate.engine:
            return
        endpoint.engine = candidate.engine
        self._set(endpoint, engine_load(candidate.engine))
        if candidate.engine is not None:
            self._ends.append((now + self._limit_seconds, endpoint, candidate.engine))

    def advance(self, now: float) -> None:
        """Revoke figures that are too old. Call it before a selection."""
        while self._ends and self._ends[0][0] <= now:
            _, endpoint, figures = self._ends.popleft()
            if endpoint.engine is figures:
                self._set(endpoint, NO_ENGINE_LOAD)

    def _set(self, endpoint: Endpoint, load: EngineLoad) -> None:
        if endpoint.engine_load != load:
            endpoint.engine_load = load
            self._table.settle(endpoint)


class PauseEnds:
    """Heap of the ends of pauses and ejections, with lazy deletion; one entry per endpoint is valid."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, int, Endpoint]] = []
        self._numbers = count()
        self.first = inf
        """Time at which `over` must be called next; infinity: nothing is scheduled."""

    def await_end(self, endpoint: Endpoint) -> None:
        """Schedule the next end of an endpoint whose health changed."""
        end = endpoint.health.next_end
        if end is not None and end != endpoint.awaited_end:
            heappush(self._ends, (end, next(self._numbers), endpoint))
            self.first = self._ends[0][0]
        endpoint.awaited_end = end

    def over(self, now: float) -> Iterator[Endpoint]:
        """Yield the endpoints with an end that is due, their health advanced to `now`."""
        while self._ends and self._ends[0][0] <= now:
            endpoint = heappop(self._ends)[2]
            self.first = self._ends[0][0] if self._ends else inf
            endpoint.health.advance(now)
            self.await_end(endpoint)
            yield endpoint


class HealthMonitor:
    """Updates the health of endpoints. Ejects those that fail unless they are the last usable one of a queue."""

    def __init__(self, table: EndpointTable, limits: SchedulerLimits) -> None:
        self._table = table
        self._limits = limits
        self._ends = PauseEnds()

    def advance(self, now: float) -> None:
        """End the pauses and ejections that are due. Every method that takes `now` calls it first."""
        if now >= self._ends.first:
            for endpoint in self._ends.over(now):
                self._table.settle(endpoint)

    def note_content(self, candidate: Candidate, now: float) -> None:
        """Record that an answer of the candidate has begun, so that it is neither full nor broken."""
        self.advance(now)
        endpoint = self._table.by_key.get(candidate.key)
        if endpoint is None:
            return
        health, state = endpoint.health, endpoint.health.state
        endpoint.pool.breaks_in_a_row = 0
        health.note_success(now)
        if health.state is not state:
            self._table.settle(endpoint)
            self._table.note_change(endpoint)

    def note_failure(
        self,
        candidate: Candidate,
        kind: FailureKind,
        now: float,
        *,
        had_begun: bool = False,
        may_follow_prompt: bool = False,
    ) -> None:
        """Record a failed attempt; `had_begun`: it failed after its first content.

        `may_follow_prompt`: pause or eject the endpoint only if another one fails much less often.
        """
        self.advance(now)
        endpoint = self._table.by_key.get(candidate.key)
        if endpoint is None:
            return
        endpoint.pool.breaks_in_a_row += kind is FailureKind.BROKE
        is_outlier = endpoint.health.note_failure(kind, now, had_begun=had_begun)
        # Never close a queue's last endpoint: all callers would wait because of what one request may have caused.
        if kind is FailureKind.BROKE and self._is_replaceable(endpoint, by_paused=False, by_better=may_follow_prompt):
            endpoint.health.pause_after_break(now)
        if is_outlier and self._is_replaceable(endpoint, by_paused=True, by_better=may_follow_prompt):
            endpoint.health.eject(now)
        self._health_changed(endpoint)

    def note_lost(self, candidate: Candidate, now: float) -> None:
        """Pause an endpoint whose runner was lost, even the last one of a queue: its requests wait for its return."""
        endpoint = self._table.by_key.get(candidate.key)
        if endpoint is not None:
            endpoint.health.pause_lost(now)
            self._health_changed(endpoint)

    def awaits_return(self, candidate: Candidate) -> bool:
        """Whether an endpoint is paused because its runner was lost."""
        endpoint = self._table.by_key.get(candidate.key)
        return endpoint is not None and endpoint.health.is_lost and endpoint.health.paused

    def note_shared_failure(self, candidate: Candidate, now: float, *, is_the_prompts: bool) -> None:
        """Record a failure that other endpoints share: the candidate stays available.

        `is_the_prompts`: whether the prompt is known to be the cause. If not, such failures count after
        `max_shared_failures` in a row.
        """
        endpoint = self._table.by_key.get(candidate.key)
        if endpoint is None:
            return
        if is_the_prompts or endpoint.health.excuses_shared_failure():
            endpoint.pool.breaks_in_a_row += 1
        else:
            self.note_failure(candidate, FailureKind.BROKE, now, may_follow_prompt=True)

    def take_back_break(self, candidate: Candidate, now: float, *, is_the_prompts: bool) -> None:
        """Revoke the last counted failure because another candidate shared it; see `note_shared_failure`."""
        self.advance(now)
        endpoint = self._table.by_key.get(candidate.key)
        if endpoint is None or not (is_the_prompts or endpoint.health.excuses_shared_failure()):
            return
        endpoint.health.take_back_break(now)
        self._health_changed(endpoint)

    def is_without_others(self, queue: str, failed: Sequence[Candidate]) -> bool:
        """Whether the queue has no usable endpoint besides these."""
        keys = {candidate.key for candidate in failed}
        usable = (endpoint for step in self._table.steps(queue) for endpoint in step.endpoints() if endpoint.is_usable)
        return all(endpoint.key in keys for endpoint in usable)

    def has_succeeded_since(self, candidate: Candidate, moment: float) -> bool:
        """Whether the candidate answered a request after this moment."""
        endpoint = self._table.by_key.get(candidate.key)
        return endpoint is not None and endpoint.health.has_succeeded_since(moment)

    def is_clean(self, candidate: Candidate, now: float) -> bool:
        """Whether a retry there is unlikely to repeat a recent failure.

        Either the candidate has succeeded since its last break, or it had no recent break and its pool has no outage.
        """
        endpoint = self._table.by_key.get(candidate.key)
        if endpoint is None or endpoint.health.has_proven_itself:
            return endpoint is not None
        is_outage = endpoint.pool.breaks_in_a_row >= self._limits.eject_after_failures
        return not is_outage and endpoint.health.has_not_failed_lately(now)

    def _health_changed(self, endpoint: Endpoint) -> None:
        self._ends.await_end(endpoint)
        self._table.settle(endpoint)
        self._table.note_change(endpoint)

    def _is_replaceable(self, endpoint: Endpoint, *, by_paused: bool, by_better: bool) -> bool:
        """Whether each queue of this endpoint has another usable one.

        `by_paused`: paused ones count; `by_better`: only those that fail much less often count.
        """
        return endpoint.group is not None and all(
            any(
                other is not endpoint
                and other.is_usable
                and (by_paused or not other.health.paused)
                and (not by_better or endpoint.health.is_much_worse_than(other.health))
                for step in self._table.steps(queue)
                for other in step.endpoints()
            )
            for queue in self._table.queues_of(endpoint.candidate)
        )
