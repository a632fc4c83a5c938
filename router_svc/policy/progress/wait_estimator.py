"""Estimates waits for a slot, a load or an answer."""

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TypeVar

from router_svc.policy import refusals
from router_svc.policy.decisions import Rejects
from router_svc.policy.endpoints.candidates import Candidate, CandidateKey, Readiness
from router_svc.policy.endpoints.capacity import Capacity, capacity_of
from router_svc.policy.endpoints.choice import Considered, PickRequest
from router_svc.policy.endpoints.cluster_view import ClusterView
from router_svc.policy.endpoints.explanation import SAMPLE_SECONDS
from router_svc.policy.estimates import Estimates, Speed, wait_seconds
from router_svc.policy.limits import TELL_INTERVAL_SECONDS, SchedulerLimits
from router_svc.policy.loading.cold_start_plan import LoadGate
from router_svc.policy.loading.wake_tracker import WakeTracker
from router_svc.policy.queue.queue import MAX_REMEMBERED_KINDS, Queue
from router_svc.policy.router_request import UNITS, Request, RequestKind, WorkUnit
from weft.kernel.values.names import ROUTE_PREFIX

T = TypeVar("T")

MAX_SLOTS_LOOKED_AT = 64
"""Running requests whose end is estimated individually; the others are assumed to end like these."""
MAX_TURNS_STEPPED = 64
"""Requests ahead in the queue that are assigned to the first slot to free; further ones are spread over all slots."""
MIN_REMAINING_SECONDS = 0.001
"""Minimum expected time until a running request ends."""
OVERDUE_SHARE = 0.15
"""Additional share of its estimated length that an overdue request is assumed to take, measured in the simulator."""


class RunningRequests:
    """Running requests by candidate."""

    def __init__(self, estimates: Estimates) -> None:
        self._estimates = estimates
        self._running: dict[CandidateKey, dict[int, Request]] = {}

    def add(self, request: Request, candidate: Candidate) -> None:
        """Add a request that runs on a candidate."""
        self._running.setdefault(candidate.key, {})[request.key] = request

    def count(self, candidate: Candidate) -> int:
        """Return the number of requests that run on a candidate."""
        return len(self._running.get(candidate.key, ()))

    def remove(self, request: Request, candidate: Candidate) -> None:
        """Remove a request that no longer runs on a candidate."""
        running = self._running[candidate.key]
        del running[request.key]
        if not running:
            del self._running[candidate.key]

    def wait_seconds(
        self,
        members: Collection[Candidate],
        all_slots: int,
        ahead: int,
        mean_work: float,
        now: float,
        unit: WorkUnit = WorkUnit.TOKENS,
    ) -> float | None:
        """Return when one of `all_slots`, all busy, is free for a request with this many ahead of it.

        `members` have some of those slots and represent all. `mean_work`: of the requests ahead, in `unit`. None:
        unknown, as no member was measured.

        The measured spread of answer lengths interpolates between an estimate for equal lengths and one for random
        ends.
        """
        speeds = [speed for member in members if (speed := self._estimates.speed(member, unit)) is not None]
        if not speeds:
            return None
        service = sum(speed.seconds_of(mean_work) for speed in speeds) / len(speeds)
        slots = max(1, all_slots)
        ends = sorted(self._ends(members, now))
        if not ends:
            return ahead * service / slots
        spread = self._spread(members) if unit is WorkUnit.TOKENS else 0.0
        by_chance = _first_by_chance(ends, slots) + ahead * service / slots
        return spread * by_chance + (1.0 - spread) * _in_order(ends, slots, ahead, service)

    def _spread(self, members: Collection[Candidate]) -> float:
        """Return how much these members' answer lengths vary, 0 to 1; see `Estimates.spread`."""
        pools = {member.pool for member in members}
        return sum(self._estimates.spread(pool) for pool in pools) / len(pools)

    def _ends(self, members: Iterable[Candidate], now: float) -> Iterator[float]:
        """Yield the seconds until each running request ends."""
        seen = 0
        for member in members:
            # Looked up once for equal requests in a row, or the lookups would take longer than the rest.
            speed: Speed | None = None
            known: WorkUnit | None = None
            asked: tuple[str, int | None] | None = None
            work = 0.0
            for request in self._running.get(member.key, {}).values():
                unit = UNITS.get(request.kind.needs.operation) or WorkUnit.TOKENS
                if unit is not known:
                    known, speed, asked = unit, self._estimates.speed(member, unit), None
                if speed is None or seen == MAX_SLOTS_LOOKED_AT:
                    continue
                seen += 1
                asks = (request.spec.tenant, request.spec.max_output_tokens)
                if asks != asked or unit is not WorkUnit.TOKENS:
                    asked, work = asks, self._estimates.expected_work(member.pool, request)
                if request.content_at is None or unit is not WorkUnit.TOKENS:
                    expected, elapsed = speed.seconds_of(work), now - request.placed_at
                else:
                    expected = speed.unit_seconds * work
                    elapsed = now - request.content_at
                yield max(expected - elapsed, OVERDUE_SHARE * expected)


def _first_by_chance(ends: Sequence[float], slots: int) -> float:
    """Return when the first of `slots` is free if answers may end at any time, after `ends` seconds on average.

    The rates of ends per second add up. The examined answers represent all slots.
    """
    rate = sum(1.0 / max(seconds, MIN_REMAINING_SECONDS) for seconds in ends)
    return len(ends) / (rate * max(slots, len(ends)))


def _in_order(ends: list[float], slots: int, ahead: int, service: float) -> float:
    """Return when a slot is free if each answer ends as expected; `ends` must be sorted, and is modified."""
    stepped = min(ahead * len(ends) // max(slots, len(ends)), MAX_TURNS_STEPPED)
    for _ in range(stepped):
        heapq.heapreplace(ends, ends[0] + service)
    rest = max(0, ahead - stepped * max(1, slots // len(ends)))
    return ends[0] + rest * service / slots


class WaitEstimator:
    """Estimates waits. It caches results on the queues and changes nothing else."""

    def __init__(self, limits: SchedulerLimits, cluster: ClusterView, wakes: WakeTracker, estimates: Estimates) -> None:
        self._limits = limits
        self._cluster = cluster
        self._index = cluster.index
        self._wakes = wakes
        self.estimates = estimates
        self.running = RunningRequests(estimates)

    def capacity(self, queue: Queue, kind: RequestKind) -> Capacity:
        """Return the capacity of a queue's members for requests of this kind."""
        known = queue.capacities.get(kind)
        if known is None:
            members = self._members(queue, kind)
            in_order = queue.name.startswith(ROUTE_PREFIX)
            preference = self._works if in_order else self._preference
            if len(queue.capacities) >= MAX_REMEMBERED_KINDS:
                queue.capacities.clear()
            known = queue.capacities[kind] = capacity_of(
                members, self._wakes.is_waking, preference, self._index.table.engine_of
            )
        return known

    def pick(self, request: Request) -> PickRequest:
        """Return what the request requires of its endpoint."""
        kind = request.kind
        return PickRequest(
            needs=kind.needs,
            excluded=self.excluded(kind) if kind.failed_wakes else kind.excluded,
            affinity_key=request.spec.affinity_key,
            prefix_digests=request.spec.prefix_digests,
            prefix_holder=request.spec.prefix_holder,
            prompt_tokens=request.spec.prompt_tokens,
            seed=request.key,
        )

    def considered(self, queue: Queue, request: Request, now: float) -> tuple[Considered, ...]:
        """Return the considered candidates for a request, at most one status interval old."""
        look = self._index.considered
        return self._recently(queue.considered, TELL_INTERVAL_SECONDS, look, queue, request, now)

    def unhealthy(self, queue: Queue, request: Request, now: float) -> Sequence[tuple[str, str]]:
        """Return the ready models with a free slot that get no request, each with the reason as text."""
        return self._recently(queue.unhealthy, SAMPLE_SECONDS, self._index.unhealthy, queue, request, now)

    def _recently(
        self,
        known: dict[RequestKind, tuple[float, T]],
        seconds: float,
        look: Callable[[str, PickRequest, float], T],
        queue: Queue,
        request: Request,
        now: float,
    ) -> T:
        """Return the result of `look` for such a request, at most `seconds` old."""
        found = known.get(request.kind)
        if found is None or now >= found[0] + seconds:
            if len(known) >= MAX_REMEMBERED_KINDS:
                known.clear()
            found = known[request.kind] = (now, look(queue.name, self.pick(request), now))
        return found[1]

    def free_slots(self, queue: Queue, capacity: Capacity) -> int:
        """Return the slots that a request of a queue could have now; those of endpoints that take none are none."""
        if not self._index.has_free(queue.name):
            return 0
        return max(0, capacity.slots - self._index.in_flight_of_queue(queue.name))

    def slot_wait(self, queue: Queue, capacity: Capacity, position: int, now: float) -> float | None:
        """Return the expected wait in seconds for a slot at this position; None: unknown.

        It uses the queue's grant rate only if that is steady: after seconds without grants, such as while a runner or
        router was away, the few grants since do not predict the next ones.
        """
        rate = queue.grant_rate.grants_per_second(now) if queue.grant_rate.is_steady(now) else None
        if rate is not None:
            return position / rate
        if capacity.ready is None:
            return None
        return wait_seconds(position - 1, capacity.slots, self.estimates.mean_service_seconds(capacity.ready))

    def shown_slot_wait(
        self, request: Request, queue: Queue, capacity: Capacity, position: int, now: float
    ) -> float | None:
        """Return the wait for a slot that a request is shown; None: unknown.

        An answer that grows token by token takes as long as its requested length at the measured speed, and an image or
        recording as long as its work. The grant rate reflects earlier requests, and would promise too much if these
        were shorter; it is used if no speed was measured.
        """
        unit = UNITS.get(request.kind.needs.operation)
        if request.kind.durable or unit is None:
            return self.slot_wait(queue, capacity, position, now)
        alike = [
            each
            for each in queue.classes.values()
            if not each.kind.durable and UNITS.get(each.kind.needs.operation) is unit
        ]
        waiting = sum(each.waiting for each in alike)
        mean = (
            sum(request_class.expected_work for request_class in alike) / waiting if waiting else request.expected_work
        )
        wait = self.running.wait_seconds(capacity.takers, capacity.slots, position - 1, mean, now, unit)
        if wait is not None or not queue.grant_rate.is_steady(now):
            return wait
        return self.slot_wait(queue, capacity, position, now)

    def load_wait(self, capacity: Capacity, gate: LoadGate | None, now: float) -> float | None:
        """Return how long a cold queue waits until a member is ready; None: unknown."""
        known: list[float] = []
        for model in capacity.waking:
            candidate = self._index.table.candidate(model)
            usual = None if candidate is None else self.estimates.load_seconds(candidate)
            status = self._wakes.status(model, now, usual)
            if status.eta_seconds is not None:
                known.append(status.eta_seconds)
        for model in capacity.loading:
            candidate = self._index.table.candidate(model)
            if candidate is not None and candidate.load_eta_seconds is not None:
                known.append(candidate.load_eta_seconds)
        if known or capacity.waking or capacity.loading:
            return min(known, default=None)
        if gate is not None:
            return gate.eta_seconds
        loads = (self.estimates.load_seconds(candidate) for candidate in capacity.asleep)
        return min((seconds for seconds in loads if seconds is not None), default=None)

    def unreachable(
        self, request: Request, queue: Queue, capacity: Capacity, gate: LoadGate | None, now: float
    ) -> Rejects | None:
        """Return the refusal of a request that would certainly end too late; None: it may be in time."""
        if request.deadline_at is None:
            return None
        if now >= request.deadline_at:
            return refusals.deadline_passed(request)
        served_by = capacity.ready or (capacity.asleep[0] if capacity.asleep else None)
        if capacity.ready is not None:
            # With a free slot it need not wait, whatever it waits for.
            is_free = self.free_slots(queue, capacity) > 0
            wait = 0.0 if is_free else self.slot_wait(queue, capacity, queue.position_of(request), now)
            waits = ("in the queue", wait)
        else:
            waits = ("until a model is loaded", self.load_wait(capacity, gate, now))
        answer = None if served_by is None else self.estimates.certain_service_seconds(served_by, request)
        # Unknown parts count as 0.
        parts = tuple((what, seconds) for what, seconds in (waits, ("to answer", answer)) if seconds is not None)
        left = request.deadline_at - now
        if sum(seconds for _, seconds in parts) <= left:
            return None
        return refusals.deadline_unreachable(request, parts, left)

    def too_late(self, request: Request, candidate: Candidate, now: float) -> Rejects | None:
        """Return the refusal of a request that ends too late even without waiting; None: it is in time."""
        if request.deadline_at is None:
            return None
        if now >= request.deadline_at:
            return refusals.deadline_passed(request)
        answer = self.estimates.certain_service_seconds(candidate, request)
        if answer is None or now + answer <= request.deadline_at:
            return None
        return refusals.deadline_unreachable(request, (("to answer", answer),), request.deadline_at - now)

    def excluded(self, kind: RequestKind) -> frozenset[CandidateKey]:
        """Return candidates of failed attempts and sleeping models that failed to wake, even a pinned primary."""
        table = self._index.table
        failed = [candidate for model in kind.failed_wakes if (candidate := table.candidate(model)) is not None]
        sharing = (each for candidate in failed for each in table.sharing(candidate))
        asleep = {each.key for each in sharing if each.readiness is Readiness.ASLEEP}
        return kind.excluded | asleep

    def _members(self, queue: Queue, kind: RequestKind) -> Iterator[Candidate]:
        members = (
            member
            for member in self._index.permitted(queue.name, kind.needs, kind.excluded)
            if not (member.readiness is Readiness.ASLEEP and (member.base_model or member.model) in kind.failed_wakes)
        )
        route = self._cluster.route_of(queue.name)
        if route is None or not route.pin_primary:
            return members
        keys, primary = list(members), route.candidates[0]
        pinned = [member for member in keys if primary in (member.model, member.pool)]
        return iter(pinned or keys)

    def _works(self, candidate: Candidate) -> tuple[object, ...]:
        return (self._wakes.failed_last(candidate.model),)

    def _preference(self, candidate: Candidate) -> tuple[object, ...]:
        failed = self._wakes.failed_last(candidate.model)
        return (failed, self._index.on_runner(candidate), candidate.model, candidate.runner)
