"""The scheduler: requests and changes of the mesh in, decisions out. Stateful, without clock, I/O or randomness.

Every method takes `now` (monotonic seconds) and returns decisions. A single loop owns the scheduler and calls it; see
router_svc/DESIGN.md for the life of a request. `Placements` has the running requests: what they cost their tenants, and
what their ends teach.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from router_svc.policy import refusals
from router_svc.policy.decisions import Decision, Placed, Rejects, Served, StopsWaking, WakeFailure
from router_svc.policy.endpoints.candidates import Candidate, Readiness
from router_svc.policy.endpoints.capacity import Capacity
from router_svc.policy.endpoints.choice import Choice
from router_svc.policy.endpoints.cluster_view import ClusterView, MeshChange
from router_svc.policy.endpoints.failing_prompts import FailingPrompts, FailureCause
from router_svc.policy.endpoints.further_turns import FurtherTurns
from router_svc.policy.endpoints.load_balancer import NOTHING_AHEAD
from router_svc.policy.endpoints.retry import RetryBudget
from router_svc.policy.estimates import Estimates
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.loading.cold_start_plan import LoadGate
from router_svc.policy.loading.load_coordinator import LoadCoordinator
from router_svc.policy.loading.wake_tracker import WakeTracker
from router_svc.policy.pool_settings import Settings, TenantSettings
from router_svc.policy.progress.status_notifier import StatusNotifier
from router_svc.policy.progress.wait_estimator import RunningRequests, WaitEstimator
from router_svc.policy.prompt_order import PromptOrder
from router_svc.policy.queue.admission import Admitted
from router_svc.policy.queue.fair_share import MIN_COST, FairShare
from router_svc.policy.queue.queue import Queue, QueueEntry
from router_svc.policy.queue.queues import Queues, queue_lengths
from router_svc.policy.quotes import Quote, Quotes
from router_svc.policy.reconciler import Reconciler
from router_svc.policy.request_table import RequestTable
from router_svc.policy.router_request import MEDIA_UNITS, UNITS, Request, WorkUnit
from weft.kernel.errors.failover import FailureKind, classify, may_be_the_requests, may_follow_prompt
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.placement_request import PoolQueue
from weft.kernel.requests.request_values import Operation, Priority

if TYPE_CHECKING:
    from router_svc.policy.queue.request_class import RequestClass, Skipped

TAKING_NO_SLOT = frozenset({Operation.TOKENIZE})
"""Operations that engines run beside their slots, so that they neither wait nor cost anything on a loaded member. If no
member is loaded, they wait for a wake like other requests."""
MAX_SPREAD_OVER = 16
_DURABLE = Priority.DURABLE
MAX_PASSED_OVER_SHARE = 0.25
"""Share of the time until its deadline after which a request takes any free endpoint; the rest is for its answer."""
MAX_TIMEOUT_SHARE = 0.5
"""The same of the queue timeout."""
MAX_TENANTS_WAITING = 16
"""Priority classes of tenants that are looked at although the requests of those before wait for endpoints."""
MAX_REVIEWS_AT_ONCE = 3
"""Maximum consecutive load plans in a step; the rest waits for the next step."""


class SchedulerMemory(NamedTuple):
    """What a scheduler knows that a new process continues with."""

    shares: FairShare
    """The fair-share accounts."""
    further_turns: FurtherTurns
    """Of the conversations of each pool."""


class Scheduler:
    """Places requests on candidates: immediately if a slot is free and no request is ahead, else in fair order."""

    def __init__(self, limits: SchedulerLimits | None = None, settings: Settings | None = None) -> None:
        limits, settings = limits or SchedulerLimits(), settings or Settings()
        self._limits = limits
        self._estimates = estimates = Estimates()
        wakes = WakeTracker(limits.wake_settle_seconds)
        cluster = self._cluster = ClusterView(settings, limits, wakes.is_under_way)
        self._index = cluster.index
        queues = self._queues = Queues(limits, settings)
        loads = self._loads = LoadCoordinator(limits, cluster, queues, wakes, estimates)
        estimator = self._estimator = WaitEstimator(limits, cluster, wakes, estimates)
        notifier = StatusNotifier(settings, cluster, queues, loads, estimator)
        self._requests = RequestTable(limits, queues, loads, estimator, notifier, cluster.index)
        self.quotes = Quotes(cluster.index, queues.caps, estimator)
        self._prompts = PromptOrder(cluster.index, queues, estimator)
        self._placements = Placements(limits, cluster, queues, loads, estimates, estimator.running, self.quotes)
        self._reconciler = Reconciler(
            limits, cluster, queues, loads, estimator, self._requests, self._placements.retries
        )

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        return self._queues.waiting

    @property
    def running(self) -> int:
        """Number of requests that hold a slot."""
        return self._index.total_in_flight

    @property
    def needs_ticks(self) -> bool:
        """Whether time alone may cause decisions: requests wait, or a wake is under way."""
        return bool(self._queues.waiting or self._loads.wakes.by_model)

    @property
    def is_hurried(self) -> bool:
        """Whether callers wait or a wake is under way; durable requests are not urgent."""
        return bool(self._queues.callers_waiting or self._loads.wakes.by_model)

    @property
    def active_tenants(self) -> int:
        """Number of tenants with waiting or running requests."""
        return len(self._queues.shares.active)

    def fair_share(self, tenant: str) -> float | None:
        """Return a tenant's account in weighted tokens; None: it has none."""
        return self._queues.shares.known_account(tenant)

    @property
    def memory(self) -> SchedulerMemory:
        """What is stored for a restart."""
        return SchedulerMemory(self._queues.shares, self._index.selector.further_turns)

    def queues(self) -> list[PoolQueue]:
        """Return the queue lengths of all pools and routes, sorted by name."""
        return queue_lengths(self._index, self._queues, self._limits)

    def apply(self, change: MeshChange, now: float) -> list[Decision]:
        """Apply a change of the mesh: place requests that can now run, refuse those without a candidate."""
        delta = self._cluster.apply(change, now)
        for model in change.gone:
            self._loads.forget(model)
        decisions = self._reconciler.settle(now)
        decisions += self._reconciler.follow(delta, now)
        if delta.queues or delta.memory:
            self._loads.note_change()
        return decisions + self._go_on(delta.queues, now)

    def tenant(self, name: str) -> TenantSettings:
        """Return the settings of a tenant."""
        return self._queues.tenants.get(name)

    def declare_tenants(self, tenants: Mapping[str, TenantSettings], now: float) -> list[Decision]:
        """Replace the declared tenants, also for waiting and running requests."""
        return self._go_on(self._queues.declare_tenants(tenants), now)

    def submit(self, request: Request, now: float) -> list[Decision]:
        """Accept a new request."""
        # An idle mesh has no tick that ends a pause.
        self._index.health.advance(now)
        decisions = self._reconciler.settle(now)
        name = self._index.table.queue_of(request.spec.model)
        if name is None:
            return [*decisions, refusals.unknown_target(request)]
        queue = self._queues.open(name)
        self._receive(request, queue, now)
        if request.spec.affinity_key:
            self._loads.tool_pauses.end(request.spec.affinity_key, now)
        self._requests.enter(request)
        self.quotes.expect(request, queue, now)
        most = request.spec.max_wait_seconds
        if most is not None and (too_late := self._first_token_too_late(request, queue, most)) is not None:
            self._requests.leave(request)
            return [*decisions, too_late]
        if request.needs.operation in TAKING_NO_SLOT and (ready := self._first_ready(request)) is not None:
            return [*decisions, self._placements.place_beside(request, ready, now)]
        may_run = not queue.keeps_waiting(request.spec.priority) and self._queues.caps.may_run(request.spec.tenant)
        if may_run and self._index.has_free(name):
            placed = self._place_directly(request, queue, now)
            if placed is not None:
                return [*decisions, placed, *self._go_on((), now)]
        decisions += self._take_in(request, queue, now)
        if request.waits:
            decisions += self._go_on((), now)
            decisions += self._requests.notify(request, now)
        return decisions

    def quote(self, request: Request, now: float) -> list[Quote] | Rejects:
        """Return when each place would answer a request that arrives now, the soonest first; it is not accepted."""
        self._index.health.advance(now)
        name = self._index.table.queue_of(request.spec.model)
        if name is None:
            return refusals.unknown_target(request)
        queue = self._queues.open(name)
        self._receive(request, queue, now)
        self._requests.enter(request)
        quotes = self.quotes.quote(request, queue, now)
        refusal = None if quotes else self._reconciler.no_candidate(request)
        self._requests.leave(request)
        return refusal or quotes

    def report_first_content(self, key: int, now: float) -> list[Decision]:
        """Record that an answer has begun: its runner is not full, and its engine takes the next prompt."""
        request = self._requests.get(key)
        if request is None:
            return []
        self._placements.note_content(request, now)
        return self._go_on((request.queue,), now) if self._queues.waiting else []

    def report_failed(
        self, key: int, attempt: int, reason: Reason, now: float, retry_after_seconds: float | None = None
    ) -> list[Decision]:
        """Handle an attempt that failed before any content: place the request elsewhere, requeue it, or refuse it.

        `retry_after_seconds`: how long the runner takes no request; None: unknown. If the request may not wait as long,
        it is placed elsewhere or refused.
        """
        request = self._requests.get(key)
        if request is None or request.placed_on is None or request.attempt != attempt:
            return []
        candidate, is_relieved = self._placements.take_back(request, now)
        freed = self._queues.reactivate(request.spec.tenant) if is_relieved else set()
        is_refused = reason is Reason.BACKEND_NOT_READY and self._placements.is_refused(request, now)
        is_too_long = self._requests.outlasts(request, retry_after_seconds or 0.0, now)
        kind = FailureKind.FINAL if is_refused else FailureKind.LACKS if is_too_long else classify(reason)
        if not (is_refused or is_too_long):
            self._placements.note_failed(request, candidate, reason, now)
        rejection = refusals.attempt_failed(key, attempt, reason)
        decisions: list[Decision] = []
        if kind is FailureKind.BOUNCED:
            request.bounces += 1
            if reason is Reason.BACKEND_NOT_READY:
                decisions += self._reconciler.doubt(request, candidate, now)
        elif kind is FailureKind.UNREACHED:
            rejection = self._reconciler.no_candidate(request)
        elif kind in (FailureKind.BROKE, FailureKind.LACKS):
            request.failures += kind is FailureKind.BROKE
            request.last_failure = rejection
            if reason is Reason.WORKER_LOST and self._reconciler.is_alone(request, candidate):
                self._index.health.note_lost(candidate, now)
            else:
                request.is_retry |= kind is FailureKind.BROKE
                request.kind = request.kind.without(candidate.key)
        if kind is FailureKind.FINAL or self._reconciler.is_exhausted(request):
            if kind is FailureKind.BOUNCED:
                self._placements.note_refused(request, candidate, now)
            self._requests.leave(request)
            decisions.append(rejection)
        else:
            self._requests.enqueue(request, now)
        decisions += self._go_on(freed, now)
        return decisions + self._requests.notify(request, now)

    def finish(
        self, key: int, now: float, served: Served | None = None, failure: Reason | None = None
    ) -> list[Decision]:
        """End a request that finished or whose caller left, and release what it held; an awaited wake continues.

        `served`: what it used; None: unknown, or not served. `failure`: the reason if it failed.
        """
        request = self._requests.get(key)
        if request is None:
            return []
        freed: set[str] = set()
        if request.waits:
            self._requests.dequeue(request, now)
        elif request.placed_on is not None and self._placements.end(request, served, failure, now):
            freed = self._queues.reactivate(request.spec.tenant)
        self._requests.leave(request)
        return self._go_on(freed, now)

    def wake_finished(
        self, model: str, failure: WakeFailure | None, now: float, *, self_reported: bool = False
    ) -> list[Decision]:
        """Handle the end of a wake: a failure, or a success that the registry's view confirms within the settle time.

        `self_reported`: its runner insists that it is awake, so it counts as ready until the registry's view changes.
        """
        if failure is None:
            decisions = self._reconciler.succeed(model, now, self_reported=self_reported)
        else:
            decisions = self._reconciler.fail(model, failure, now)
        return decisions + self._go_on((), now)

    def opens_at(self, now: float) -> float | None:
        """Return when an engine with a free slot is soon done with its prompts, so that a waiting one can be placed."""
        if not self._queues.waiting:
            return None
        pools = (self._index.table.pools.get(queue.name) for queue in self._queues.backlogged())
        at = min((pool.opens_at(now) for pool in pools if pool is not None), default=inf)
        return at if at < inf else None

    def proceed(self, now: float) -> list[Decision]:
        """Place waiting requests, when `opens_at` is reached."""
        return self._go_on([queue.name for queue in self._queues.backlogged()], now)

    def tick(self, now: float) -> list[Decision]:
        """Advance time: refuse expired requests, place others, and send due status messages."""
        self._index.health.advance(now)
        decisions = self._reconciler.settle(now)
        decisions += self._requests.expire(now)
        self._loads.note_time()
        decisions += self.proceed(now)
        return decisions + self._requests.notify_due(now)

    def _receive(self, request: Request, queue: Queue, now: float) -> None:
        route = self._cluster.route_of(queue.name)
        if route is not None and route.conditions:
            skipped = route.skipped(
                request.spec,
                request.arrived_wall,
                allow_remote=request.needs.allow_remote,
                budget_left=request.budget_left,
            )
            request.needs = replace(request.needs, skipped=skipped)
        deadline_at = request.own_deadline_at
        is_durable = request.spec.priority is _DURABLE
        if route is not None and route.budget_seconds is not None and not is_durable:
            end = request.arrived_at + route.budget_seconds
            deadline_at = end if deadline_at is None else min(deadline_at, end)
        pool = queue.name if route is None else route.candidates[0]
        request.enter(queue.name, queue.kind_of(request.needs, durable=is_durable), deadline_at, now)
        request.cost = self._cost_of(request, pool)
        request.keep_alive_seconds = None if route is None else route.keep_alive_seconds
        request.expected_work = self._estimates.expected_work(pool, request)

    def _first_token_too_late(self, request: Request, queue: Queue, most: float) -> Rejects | None:
        """Return the refusal of a new request whose first token is expected later than after `most` s; None: none."""
        # Without a candidate, that is the reason.
        if request.spec.age_seconds or not self._estimator.capacity(queue, request.kind).count:
            return None
        expected = None if request.estimate is None else request.estimate.first_most
        if expected is not None and expected <= most:
            return None
        return refusals.first_token_too_late(request, expected, most)

    def _cost_of(self, request: Request, pool: str) -> float:
        """Return the expected charge of a request in tokens."""
        unit = MEDIA_UNITS.get(request.needs.operation)
        if unit is not None:
            return max(MIN_COST, self._estimates.media_cost(pool, unit, request.spec.work))
        spec = request.spec
        return spec.prompt_tokens + self._estimates.output_tokens(pool, spec.tenant, spec.max_output_tokens)

    def _first_ready(self, request: Request) -> Candidate | None:
        """Return a ready candidate that meets the needs, in a route's first usable entry; None: none is loaded.

        Requests are spread over the first candidates of the same pool.
        """
        permitted = self._index.permitted(request.queue, request.kind.needs, request.kind.excluded)
        found = list(islice((each for each in permitted if each.readiness is Readiness.READY), MAX_SPREAD_OVER))
        same_pool = [each for each in found if each.pool == found[0].pool]
        return same_pool[request.key % len(same_pool)] if same_pool else None

    def _place_directly(self, request: Request, queue: Queue, now: float) -> Decision | None:
        """Place a request with no other ahead; None: no candidate is free for it."""
        pick = self._estimator.pick(request)
        best = None
        # A prompt without digests is too short to be cached, and its prefill too short to wait for a certain engine.
        if pick.prefix_digests and self._index.awaits_prompts(queue.name):
            best = self._index.best(queue.name, pick, now, NOTHING_AHEAD)
            if best is not None and not best.is_free:
                if best.wait_seconds <= _patience_seconds(request):
                    return None
                best = None
        if best is None:
            choice = self._index.choose(queue.name, pick, now)
        else:
            choice = self._index.choice_of(queue.name, pick, best.selection, now)
        if choice is None:
            return None
        late = self._estimator.too_late(request, choice.candidate, now)
        if late is not None:
            self._requests.leave(request)
            return late
        queue.note_placed(request.spec.tenant, request.spec.priority, request.waited_seconds, now)
        return self._placements.place(request, choice, now)

    def _take_in(self, request: Request, queue: Queue, now: float) -> list[Decision]:
        """Queue a request, which may evict a waiting one, or refuse it."""
        capacity = self._estimator.capacity(queue, request.kind)
        if not capacity.count:
            self._requests.leave(request)
            return [self._reconciler.no_candidate(request)]
        if request.kind.durable and self._queues.durable_waiting >= self._limits.max_durable_waiting:
            self._requests.leave(request)
            waiting, most = self._queues.durable_waiting, self._limits.max_durable_waiting
            message = f"{waiting} durable requests wait, which is the limit"
            return [refusals.of_queue(request, message, waiting=waiting, depth=most)]
        # The end of a postponed load matters only with a deadline.
        request_class = None if request.deadline_at is None else queue.classes.get(request.kind)
        gate = None if request_class is None else self._loads.gate_of(request_class)
        admitted = self._admit(request, queue, capacity, gate, now)
        if isinstance(admitted, Rejects):
            self._requests.leave(request)
            return [admitted]
        self._requests.enqueue(request, now)
        if admitted.instead_of is None:
            return []
        victim = self._requests.live(admitted.instead_of)
        return [self._requests.drop(victim, self._requests.admission.was_evicted(victim, queue, capacity, now), now)]

    def _admit(
        self, request: Request, queue: Queue, capacity: Capacity, gate: LoadGate | None, now: float
    ) -> Rejects | Admitted:
        overload = self._requests.admission.in_overload(request, queue, capacity, now)
        if isinstance(overload, Rejects):
            return overload
        unreachable = self._estimator.unreachable(request, queue, capacity, gate, now)
        if unreachable is not None:
            return unreachable
        return overload or self._requests.admission.in_depth(request, queue, capacity, now)

    def _go_on(self, names: Collection[str], now: float) -> list[Decision]:
        """Place requests of these queues and of all with freed endpoints, and review loads."""
        self._index.health.advance(now)
        is_changed = names or self._requests.joined or self._index.table.freed
        decisions = self._serve(names, now) if is_changed else []
        for _ in range(MAX_REVIEWS_AT_ONCE):
            if not self._loads.is_due(now):
                break
            plan, lifted = self._loads.review(now)
            self._requests.note_plan(now)
            for start in plan.begin:
                decisions += self._reconciler.begin(start, now)
            decisions += (StopsWaking(model=model) for model in plan.give_up)
            if lifted:
                decisions += self._serve((), now)
        return decisions

    def _serve(self, names: Iterable[str], now: float) -> list[Decision]:
        """Place all requests of these queues that can be placed, by rank."""
        queues = self._changed_queues(names)
        if not queues:
            return []
        blocked: set[RequestClass] = set()
        skipped: dict[RequestClass, set[tuple[Priority, str]]] = {}
        decisions: list[Decision] = []
        while (first := self._first_entry(queues, blocked, skipped, now)) is not None:
            decision, waits = self._try(first, now)
            if decision is not None:
                decisions.append(decision)
                if len(queues) > 1 and isinstance(decision, Placed):
                    self._note_passed_over(first, decision.candidate, queues)
                continue
            passed = skipped.setdefault(first.request_class, set())
            if waits and len(passed) < MAX_TENANTS_WAITING:
                passed.add((first.priority, first.head.tenant))
            else:
                blocked.add(first.request_class)
        return decisions

    def _first_entry(
        self,
        queues: Iterable[Queue],
        blocked: set["RequestClass"],
        skipped: Mapping["RequestClass", "Skipped"],
        now: float,
    ) -> QueueEntry | None:
        first: QueueEntry | None = None
        for queue in queues:
            if queue.waiting and self._index.takes_prompts(queue.name, now):
                for head in queue.entries(blocked, now, skipped):
                    if first is None or head.rank < first.rank:
                        first = head
        return first

    def _changed_queues(self, names: Iterable[str]) -> Sequence[Queue]:
        """Return the backlogged queues among these, those with freed endpoints, and those that requests joined."""
        joined, freed = self._requests.take_joined(), self._index.table.take_freed()
        # Most requests join a queue because none of its endpoints is free.
        return self._queues.backlogged_of({*names, *filter(self._index.has_free, joined), *freed})

    def _note_passed_over(self, granted: QueueEntry, candidate: Candidate, queues: Iterable[Queue]) -> None:
        """Count the grant for lower classes of other queues that wanted the slot, as for the queue itself."""
        wanted_by = self._index.table.queues_of(candidate)
        others = [
            queue
            for queue in queues
            if queue.waiting and queue.name in wanted_by and queue.name != granted.request_class.queue
        ]
        for queue in others:
            queue.note_passed_over(granted.head.tenant, granted.priority, 1.0 / len(others))

    def _try(self, chosen: QueueEntry, now: float) -> tuple[Decision | None, bool]:
        """Place the chosen request, or one of its tenant that is better served; None: no candidate is free for them.

        Also returns whether they wait for candidates that take no prompt now.
        """
        first = self._requests.live(chosen.head.key)
        if not first.spec.prefix_digests or not self._index.awaits_prompts(first.queue):
            return self._take_free(chosen, first, now), False
        if self._is_urgent(first, now) and (decision := self._take_free(chosen, first, now)) is not None:
            return decision, False
        prompts = chosen.request_class.prompts[chosen.priority, chosen.head.tenant]
        found = self._prompts.next(prompts, first, now)
        if found is None:
            if first.awaited is not None:
                return None, True
            # Only endpoints that are ejected are left.
            return self._take_free(chosen, first, now), False
        request, best = found
        first.passed_over += request is not first
        choice = self._index.choice_of(request.queue, self._estimator.pick(request), best.selection, now)
        return self._grant(chosen, request, choice, now), False

    def _take_free(self, chosen: QueueEntry, request: Request, now: float) -> Decision | None:
        """Place a request on a free candidate, even if it had its first token sooner elsewhere; None: none is free."""
        choice = self._index.choose(request.queue, self._estimator.pick(request), now)
        return self._grant(chosen, request, choice, now) if isinstance(choice, Choice) else None

    def _grant(self, chosen: QueueEntry, request: Request, choice: Choice, now: float) -> Decision:
        """Place a waiting request, or refuse it if its retry is not allowed."""
        if not self._placements.may_try(request, choice.candidate, now):
            assert request.last_failure is not None, "only a request that failed is retried"
            return self._requests.drop(request, request.last_failure, now)
        queue = self._queues.open(request.queue)
        waited = now - request.arrived_at
        queue.note_grant(chosen, waited, now)
        self._requests.dequeue(request, now)
        return self._placements.place(request, choice, now)

    def _is_urgent(self, request: Request, now: float) -> bool:
        """Whether a request takes what is free, as it has used its share of its time or of the queue timeout."""
        times_out_at = request.queued_since + MAX_TIMEOUT_SHARE * self._limits.queue_timeout_seconds
        is_late = now > times_out_at and not request.kind.durable
        return is_late or now > request.arrived_at + _patience_seconds(request)


class Placements:
    """Takes and releases slots, and updates accounts, caps, estimates and retry budgets accordingly."""

    def __init__(
        self,
        limits: SchedulerLimits,
        cluster: ClusterView,
        queues: Queues,
        loads: LoadCoordinator,
        estimates: Estimates,
        running: RunningRequests,
        quotes: Quotes,
    ) -> None:
        self._index = cluster.index
        self._queues = queues
        self._loads = loads
        self._estimates = estimates
        self._running = running
        self._quotes = quotes
        self.retries = RetryBudget(limits)
        self._failing = FailingPrompts()

    def may_try(self, request: Request, candidate: Candidate, now: float) -> bool:
        """Whether this is a first attempt, or its queue's retry budget allows it."""
        if not request.is_retry:
            return True
        return self.retries.allow(request.queue, self._index.health.is_clean(candidate, now), now)

    def place(self, request: Request, choice: Choice, now: float) -> Placed:
        """Place the request on the chosen candidate."""
        candidate, tenant = choice.candidate, request.spec.tenant
        if request.attempt == request.spec.attempts_used:
            self.retries.note_first_attempt(request.queue, now)
        request.attempt += 1
        request.placed_on, request.placed_at, request.content_at = candidate, now, None
        request.last_status, request.holds_slot = None, True
        request.charged = self._queues.shares.charge(tenant, request.cost)
        self._queues.caps.take(tenant)
        self._index.take(candidate)
        request.expected = choice.expected
        seconds = 0.0 if choice.expected is None else choice.expected.own_seconds
        self._index.add_prompt(candidate, request.uncached_tokens, seconds, now)
        self._running.add(request, candidate)
        self._loads.note_grant(candidate, now, durable=request.kind.durable)
        return Placed(
            key=request.key,
            candidate=candidate,
            attempt=request.attempt,
            choice=choice,
            keep_alive_seconds=request.keep_alive_seconds,
            deadline_at=request.deadline_at,
        )

    def place_beside(self, request: Request, candidate: Candidate, now: float) -> Placed:
        """Place the request beside the slots of a candidate: it is not charged and delays no other request."""
        request.attempt += 1
        request.placed_on, request.placed_at, request.content_at = candidate, now, None
        request.last_status, request.holds_slot, request.charged = None, False, 0.0
        return Placed(
            key=request.key,
            candidate=candidate,
            attempt=request.attempt,
            keep_alive_seconds=request.keep_alive_seconds,
            deadline_at=request.deadline_at,
        )

    def note_content(self, request: Request, now: float) -> None:
        """Record that the answer has begun."""
        if request.placed_on is not None and request.content_at is None:
            request.content_at = now
            self._quotes.note_first_token(request, now)
            if request.holds_slot:
                took = self._index.end_prompt(request.placed_on, request.uncached_tokens, now)
                request.prefill_seconds = min(now - request.placed_at, took)
            self._index.health.note_content(request.placed_on, now)

    def take_back(self, request: Request, now: float) -> tuple[Candidate, bool]:
        """Release the slot of a failed attempt, which is not charged.

        Returns the candidate, and whether its tenant was at its cap.
        """
        return self._release(request, 0.0, now)

    def note_failed(
        self, request: Request, candidate: Candidate, reason: Reason, now: float, *, had_begun: bool = False
    ) -> None:
        """Record a failed attempt for the candidate's health; `had_begun`: it failed after its first content."""
        health, kind = self._index.health, classify(reason)
        if not may_follow_prompt(reason):
            health.note_failure(candidate, kind, now, had_begun=had_begun)
            return
        prompt = self._failing.of(request.queue, request.spec.prompt_digest, request.key, now)
        cause = prompt.note(candidate, request.key)
        is_shared = cause is FailureCause.SHARED and may_be_the_requests(reason)
        if cause is not FailureCause.PROMPT and not is_shared:
            health.note_failure(candidate, kind, now, had_begun=had_begun, may_follow_prompt=True)
            prompt.counted_on = candidate
            return
        is_the_prompts = cause is FailureCause.PROMPT or health.is_without_others(request.queue, prompt.failed_on)
        if prompt.counted_on is not None:
            health.take_back_break(prompt.counted_on, now, is_the_prompts=is_the_prompts)
            prompt.counted_on = None
        health.note_shared_failure(candidate, now, is_the_prompts=is_the_prompts)

    def is_refused(self, request: Request, now: float) -> bool:
        """Whether engines refuse the request's prompt while they answer others."""
        return self._failing.is_refused(request.queue, request.spec.prompt_digest, now)

    def note_refused(self, request: Request, candidate: Candidate, now: float) -> None:
        """Record that all attempts of a request were refused, if others were answered meanwhile."""
        if self._index.health.has_succeeded_since(candidate, request.arrived_at):
            self._failing.of(request.queue, request.spec.prompt_digest, request.key, now).is_refused = True

    def end(self, request: Request, served: Served | None, failure: Reason | None, now: float) -> bool:
        """End a request. Returns whether its tenant was at its cap.

        An interrupted answer counts against its runner and is not measured.
        """
        candidate = request.placed_on
        assert candidate is not None, "only a placed request ends"
        # Concurrent requests on a model share its device.
        seconds = now - request.placed_at
        device_seconds = seconds / max(1, self._running.count(candidate))
        content_at, unit = request.content_at, MEDIA_UNITS.get(request.kind.needs.operation)
        tokens = self._charge_of(request, candidate, served, unit, device_seconds)
        _, is_relieved = self._release(request, tokens, now)
        if failure is not None and classify(failure) is FailureKind.BROKE:
            self.note_failed(request, candidate, failure, now, had_begun=content_at is not None)
        elif request.kind.needs.operation is Operation.TOKENIZE:
            pass  # It is no measure of work or free slots.
        elif served is not None and failure is None:
            if unit is not None:
                self._estimates.note_media(candidate, unit, request.spec.work, seconds, device_seconds)
            else:
                self._note_answer(request, candidate, served, seconds)
                session = request.spec.affinity_key
                # Nothing that callers wait for is kept out for the tools of a durable task.
                if served.awaits_tool_results and session and candidate.host and not request.kind.durable:
                    self._loads.tool_pauses.begin(candidate.model, session, now)
                self._quotes.note_end(request, now)
                if served.energy_joules is not None and seconds > 0:
                    self._quotes.watts.note(candidate.model_host, served.energy_joules / seconds)
            if UNITS.get(request.kind.needs.operation) is WorkUnit.TOKENS:
                self._estimates.note_exchange(candidate, tokens, device_seconds)
            if content_at is None:
                self._index.health.note_content(candidate, now)
            self._failing.note_answer(request.queue, request.spec.prompt_digest)
        return is_relieved

    def _note_answer(self, request: Request, candidate: Candidate, served: Served, seconds: float) -> None:
        content_at = request.content_at
        first = None if content_at is None else content_at - request.placed_at
        spec = request.spec
        self._estimates.note_served(candidate, spec.tenant, served, seconds, first, limit=spec.max_output_tokens)
        expected, selector = request.expected, self._index.selector
        if expected is not None and first is not None:
            processed = max(0, served.prompt_tokens - served.cached_tokens)
            speed = selector.speeds.note(candidate, processed, request.prefill_seconds, request.placed_at + first)
            intervals = served.output_tokens - 1
            speed.note_answer(seconds, (seconds - first) / intervals if intervals > 0 else None)
            selector.caches.correct(candidate, expected.hit, served.cached_tokens)

    def _charge_of(
        self,
        request: Request,
        candidate: Candidate,
        served: Served | None,
        unit: WorkUnit | None,
        device_seconds: float,
    ) -> float:
        """Return the charge in tokens: for media the device time that it took, however it ended."""
        if unit is None:
            return _tokens_of(request, served)
        return device_seconds * self._estimates.tokens_per_device_second(candidate)

    def _release(self, request: Request, tokens: float, now: float) -> tuple[Candidate, bool]:
        candidate, tenant = request.placed_on, request.spec.tenant
        assert candidate is not None, "only a placed request holds a slot"
        request.placed_on = None
        if not request.holds_slot:
            return candidate, False
        self._queues.shares.correct(tenant, request.charged, tokens)
        if request.content_at is None:
            self._index.end_prompt(candidate, request.uncached_tokens, now)
        is_relieved = self._queues.caps.release(tenant)
        self._index.release(candidate)
        self._running.remove(request, candidate)
        self._loads.note_release(candidate, now, durable=request.kind.durable)
        return candidate, is_relieved


def _patience_seconds(request: Request) -> float:
    """Return how long a request waits for its best endpoint although another is free."""
    return inf if request.deadline_at is None else MAX_PASSED_OVER_SHARE * (request.deadline_at - request.arrived_at)


def _tokens_of(request: Request, served: Served | None) -> float:
    """Return its cost in tokens; if unknown, the estimate once content began, else 0."""
    if served is None:
        return request.charged if request.content_at is not None else 0.0
    return float(max(0, served.prompt_tokens - served.cached_tokens) + served.output_tokens)
