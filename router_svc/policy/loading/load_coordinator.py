"""Load coordination: collects the queues' demands and the residents, and decides when the load planner runs."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from router_svc.policy.endpoints.candidates import Candidate, CandidateKey, Readiness
from router_svc.policy.endpoints.capacity import Capacity
from router_svc.policy.endpoints.cluster_view import ClusterView
from router_svc.policy.estimates import Estimates
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.loading.cold_start_plan import Demand, LoadGate, LoadPlan, Resident
from router_svc.policy.loading.cold_start_planner import LoadPlanner
from router_svc.policy.loading.swap_cost import SwapCosts
from router_svc.policy.loading.tool_pauses import ToolPauses
from router_svc.policy.loading.wake_tracker import WakeTracker
from router_svc.policy.queue.queues import Queues
from router_svc.policy.queue.request_class import FirstRequest, RequestClass, rank_of
from weft.kernel.requests.request_values import Priority

Shape = tuple[str, tuple[str, ...], int, bool]
"""Queue, models that could be loaded for it, slots that serve it meanwhile, whether it is durable."""
_DURABLE = " (durable)"


@dataclass(slots=True)
class _Group:
    """Request classes of a queue that the same models could be loaded for."""

    asleep: tuple[Candidate, ...]
    capacity: Capacity
    first: FirstRequest
    """The next request of all classes."""
    classes: list[RequestClass] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Demands:
    """All demands, and the name of each class's demand."""

    demands: tuple[Demand, ...]
    label_of: Mapping[RequestClass, str]


def demands_of(
    demanding: Mapping[RequestClass, Capacity], worth_loading: Callable[[Capacity], tuple[Candidate, ...]], now: float
) -> Demands:
    """Build one demand per queue and set of models that could be loaded, durable classes separately.

    A demand has the name of its queue; a queue's demands for only some of its models include the models' names.
    """
    groups: dict[Shape, _Group] = {}
    for request_class, capacity in demanding.items():
        asleep, first = worth_loading(capacity), request_class.head()
        if not asleep or first is None:
            continue
        models = tuple(candidate.model for candidate in asleep)
        shape = (request_class.queue, models, capacity.slots, request_class.kind.durable)
        group = groups.get(shape)
        if group is None:
            group = groups[shape] = _Group(asleep, capacity, first)
        group.classes.append(request_class)
        group.first = min(group.first, first, key=rank_of)
    widest: dict[tuple[str, bool], Shape] = {}
    for shape in groups:
        known = widest.get((shape[0], shape[3]))
        if known is None or len(shape[1]) > len(known[1]):
            widest[shape[0], shape[3]] = shape
    labels = {shape: _named(shape, is_widest=widest[shape[0], shape[3]] == shape) for shape in groups}
    return Demands(
        tuple(_demand(labels[shape], group, now) for shape, group in groups.items()),
        {request_class: labels[shape] for shape, group in groups.items() for request_class in group.classes},
    )


def _named(shape: Shape, *, is_widest: bool) -> str:
    queue, models, slots, is_durable = shape
    which = "" if is_widest else f" ({', '.join(models)}; {slots} slots)"
    return f"{queue}{which}{_DURABLE if is_durable else ''}"


def _demand(label: str, group: _Group, now: float) -> Demand:
    classes, (priority, head) = group.classes, group.first
    deadlines = [deadline for request_class in classes if (deadline := request_class.earliest_deadline()) is not None]
    return Demand(
        queue=label,
        asleep=group.asleep,
        waiting=sum(request_class.waiting for request_class in classes),
        priority=priority,
        oldest_arrived_at=min(each.oldest_arrived_at() for each in classes),
        waited_seconds=max(0.0, sum(each.waiting * now - each.arrived_sum for each in classes)),
        queued_tokens=sum(request_class.queued_tokens for request_class in classes),
        tenant=head.tenant,
        account=head.account,
        turn=head.turn,
        ready_slots=group.capacity.slots,
        loading_slots=group.capacity.loading_slots,
        deadline_at=min(deadlines, default=None),
    )


REVIEW_INTERVAL_SECONDS = 0.05
"""Minimum time between two plans if only the queues change."""


@dataclass(slots=True)
class _QueuedDemand:
    """Waiting requests for a resident, over all queues that it serves."""

    queued_tokens: float = 0.0
    durable_tokens: float = 0.0
    first: FirstRequest | None = None


class LoadCoordinator:
    """Collects the queues' demands and the residents, and runs the planner."""

    def __init__(
        self, limits: SchedulerLimits, cluster: ClusterView, queues: Queues, wakes: WakeTracker, estimates: Estimates
    ) -> None:
        self._limits = limits
        self._cluster = cluster
        self._index = cluster.index
        self._queues = queues
        self.wakes = wakes
        self._planner = LoadPlanner(limits, estimates)
        self._costs = SwapCosts(limits, estimates)
        self._demanding: dict[RequestClass, Capacity] = {}
        """Classes with waiting requests and sleeping candidates."""
        self._gates: Mapping[str, LoadGate] = {}
        self._label_of: Mapping[RequestClass, str] = {}
        self._decided: frozenset[str] = frozenset()
        self._held: frozenset[CandidateKey] = frozenset()
        self._granted_at: dict[str, float] = {}
        """By model."""
        self._used_at: dict[str, float] = {}
        """Time at which a caller's request last ended, by model."""
        self.tool_pauses = ToolPauses()
        self._durable_on: Counter[CandidateKey] = Counter()
        """Running durable requests, by candidate."""
        self._failed_at: dict[str, float] = {}
        """By model."""
        self._reviewed_at = -math.inf
        self._is_urgent = False
        self._is_stale = False

    def note_demand(self, request_class: RequestClass, capacity: Capacity) -> None:
        """Record that requests wait in this class, with the capacity for them."""
        if not capacity.asleep:
            self.drop_demand(request_class)
            return
        self._is_urgent |= request_class not in self._demanding
        self._is_stale = True
        self._demanding[request_class] = capacity

    def drop_demand(self, request_class: RequestClass) -> None:
        """Record that no request of this class needs a load."""
        if self._demanding.pop(request_class, None) is not None:
            self._is_urgent = True

    def note_change(self) -> None:
        """Record a change of the mesh, its memory, or a load under way."""
        self._is_urgent = True

    def note_grant(self, candidate: Candidate, now: float, *, durable: bool) -> None:
        """Record that a request was granted to a candidate."""
        self._granted_at[candidate.model] = now
        self._is_stale = True
        if durable:
            self._durable_on[candidate.key] += 1

    def note_release(self, candidate: Candidate, now: float, *, durable: bool) -> None:
        """Record that a request on a candidate ended."""
        self._is_stale = True
        if not durable:
            self._used_at[candidate.model] = now
        elif self._durable_on[candidate.key] > 1:
            self._durable_on[candidate.key] -= 1
        else:
            del self._durable_on[candidate.key]
        if self._held and candidate.key in self._held and not self._index.in_flight(candidate):
            self._is_urgent = True

    def note_no_memory(self, model: str, now: float) -> None:
        """Record that a load found no memory."""
        self._planner.note_no_memory(model, now)
        self._is_urgent = True

    def note_failed(self, model: str, now: float) -> None:
        """Record a failed load, so that requests with an alternative do not demand it again immediately."""
        self._failed_at[model] = now
        self._is_urgent = True

    def forget(self, model: str) -> None:
        """Remove a model that left the mesh."""
        self._granted_at.pop(model, None)
        self._used_at.pop(model, None)
        self._failed_at.pop(model, None)
        self.tool_pauses.forget(model)
        self.wakes.forget(model)

    def gate_of(self, request_class: RequestClass) -> LoadGate | None:
        """Return what blocks the load for a class; None: nothing does."""
        return self._gates.get(self._label_of.get(request_class, request_class.queue))

    def is_decided(self, request_class: RequestClass) -> bool:
        """Whether a load for this class is certain and only waits for evictions or earlier loads."""
        return self._label_of.get(request_class) in self._decided

    def demanding(self) -> Iterable[tuple[RequestClass, Capacity]]:
        """Return the classes that demand a load, with their capacity. Read-only."""
        return self._demanding.items()

    def is_held(self, candidate: Candidate) -> bool:
        """Whether a candidate takes no new requests because it will be evicted."""
        return candidate.key in self._held

    def is_due(self, now: float) -> bool:
        """Whether the planner should run now."""
        if not self._demanding:
            return bool(self._held or self._gates or (self._is_stale and self.wakes.by_model))
        return self._is_urgent or (self._is_stale and now >= self._reviewed_at + REVIEW_INTERVAL_SECONDS)

    def note_time(self) -> None:
        """Record that time passed, which can make demands due."""
        self._is_stale = True

    def review(self, now: float) -> tuple[LoadPlan, frozenset[CandidateKey]]:
        """Run the planner. Returns its plan and the candidates that are no longer held."""
        self._reviewed_at, self._is_urgent, self._is_stale = now, False, False
        found = demands_of(self._demanding, lambda capacity: self._worth_loading(capacity, now), now)
        hosts = {candidate.host for demand in found.demands for candidate in demand.asleep if candidate.host}
        residents = {host: self._residents_of(host, now) for host in sorted(hosts)}
        loading = self._loading_on(residents)
        plan = self._planner.review(found.demands, residents, self._cluster.hosts, self._waking(), now, loading=loading)
        hold, instead = self._with_adapters(plan)
        lifted = self._held - hold
        if hold != self._held:
            self._held = hold
            self._index.table.hold(hold, instead)
        self._gates, self._label_of, self._decided = plan.gates, found.label_of, plan.decided
        return plan, lifted

    def _with_adapters(self, plan: LoadPlan) -> tuple[frozenset[CandidateKey], Mapping[CandidateKey, str]]:
        """Extend a plan's held models and their replacements by all models that share an engine with a held one."""
        table = self._index.table
        held = ((key, table.candidate(key[0])) for key in plan.hold)
        sharing = {
            each.key: key for key, candidate in held if candidate is not None for each in table.sharing(candidate)
        }
        instead = {each: plan.instead[key] for each, key in sharing.items() if key in plan.instead}
        return plan.hold | sharing.keys(), {**plan.instead, **instead}

    def _waking(self) -> dict[str, Candidate]:
        """Return the models with a wake under way as the mesh shows them, or as they slept if they left the mesh."""
        found = ((before, self._index.table.candidate(before.model)) for before in self.wakes.under_way)
        return {before.model: before if now is None else now for before, now in found}

    def _loading_on(self, hosts: Iterable[str]) -> set[str]:
        """Return the models that are loading and hold memory of these hosts."""
        books = (self._cluster.hosts[host] for host in hosts if host in self._cluster.hosts)
        named = (
            self._index.table.candidate(holder.name) for book in books for holder in book.holders if holder.is_model
        )
        return {each.model for each in named if each is not None and each.readiness is Readiness.LOADING}

    def first_for(self, candidate: Candidate) -> tuple[Priority, int | None]:
        """Return the priority class and key of the first request that a candidate is woken for."""
        heads = (each.head() for each, capacity in self._demanding.items() if candidate in capacity.asleep)
        first = min(filter(None, heads), key=rank_of, default=None)
        return (Priority.NORMAL, None) if first is None else (first[0], first[1].key)

    def _worth_loading(self, capacity: Capacity, now: float) -> tuple[Candidate, ...]:
        """Return the sleeping members to load.

        Excluded: members of lost runners, and recently failed ones if others serve, load or wake.
        """
        asleep = tuple(each for each in capacity.asleep if not self._index.health.awaits_return(each))
        if capacity.is_cold and not capacity.loading and not capacity.waking:
            return asleep
        since = now - self._limits.failed_load_pause_seconds
        failed_at = self._failed_at
        return tuple(each for each in asleep if failed_at.get(each.model, -math.inf) <= since)

    def _residents_of(self, host: str, now: float) -> list[Resident]:
        # An adapter is evicted only with its base model, and that resident has the requests of both.
        engine_of = self._index.table.engine_of
        ready = self._cluster.ready_on(host)
        return [self._resident(each, since, now) for each, since in ready if engine_of(each) is each]

    def _resident(self, candidate: Candidate, since: float, now: float) -> Resident:
        table = self._index.table
        sharing = table.sharing(candidate) or (candidate,)
        load_seconds = self._costs.load_seconds(candidate)
        state = self._standing(dict.fromkeys(queue for each in sharing for queue in table.queues_of(each)))
        return Resident(
            candidate=candidate,
            active=sum(self._index.in_flight(each) for each in sharing),
            durable_active=sum(self._durable_on.get(each.key, 0) for each in sharing),
            queued_tokens=state.queued_tokens,
            durable_tokens=state.durable_tokens,
            tenant="" if state.first is None else state.first[1].tenant,
            account=math.inf if state.first is None else state.first[1].account,
            priority=None if state.first is None else state.first[0],
            last_granted_at=max(self._granted_at.get(each.model, -math.inf) for each in sharing),
            last_used_at=max(self._used_at.get(each.model, -math.inf) for each in sharing),
            since=since,
            awaits_tools=any(self.tool_pauses.is_awaited(each.model, load_seconds, now) for each in sharing),
        )

    def _standing(self, queues: Iterable[str]) -> _QueuedDemand:
        state = _QueuedDemand()
        for name in queues:
            queue = self._queues.get(name)
            if queue is None or not queue.waiting:
                continue
            for request_class in queue.classes.values():
                if request_class.kind.durable:
                    state.durable_tokens += request_class.queued_tokens
                else:
                    state.queued_tokens += request_class.queued_tokens
                first = request_class.head()
                if first is not None:
                    state.first = min(state.first or first, first, key=rank_of)
        return state
