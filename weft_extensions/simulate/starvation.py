"""Starvation bounds on waits for a load, beside a free slot, and behind what goes first.

The bounds are computed from the scenario with a margin; exceeding one means that a request starves.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from math import ceil, inf
from typing import NamedTuple

from router_svc.policy.endpoints.candidates import Candidate, Needs, Readiness
from router_svc.policy.endpoints.cluster_view import MeshChange
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.queue.request_class import BAND_OF, BANDS
from router_svc.policy.router_request import Request
from weft.kernel.requests.request_values import Priority
from weft.kernel.values.names import ROUTE_PREFIX
from weft_extensions.simulate.hosts import HOLDS_MEMORY, Instance, Targets, World, lacks
from weft_extensions.simulate.scenario import FailureMode, Scenario

SLACK_SECONDS = 3.0
"""Margin for reports, ticks, and reads of the VRAM ledger."""
SLACK_GRANTS = 2


class Kind(NamedTuple):
    """Interchangeable requests: the same queue and needs."""

    queue: str
    needs: Needs


class Behind(NamedTuple):
    """Requests of a queue that go after others: a tenant's of a class, or all of a band (no tenant)."""

    queue: str
    priority: Priority
    tenant: str = ""

    @staticmethod
    def of(queue: str, request: Request, *, as_band: bool) -> "Behind":
        """Returns what a request belongs to."""
        priority, tenant = request.spec.priority, request.spec.tenant
        return Behind(queue, BANDS[BAND_OF[priority]][0]) if as_band else Behind(queue, priority, tenant)

    def goes_after(self, placed: Request) -> bool:
        """Whether they go after the placed request: by their band, or by their class within its tenant."""
        before = placed.spec.priority
        if not self.tenant:
            return BAND_OF[self.priority] > BAND_OF[before]
        return (self.tenant, BAND_OF[self.priority]) == (placed.spec.tenant, BAND_OF[before]) and self.priority > before


class StarvationDetector:
    """Tracks how long requests are passed over."""

    def __init__(self, scenario: Scenario, targets: Targets, reported: Mapping[str, Candidate]) -> None:
        """`reported`: the models as seen by the scheduler."""
        self._scenario = scenario
        self._targets = targets
        self._reported = reported
        self._pool_of = {instance.name: instance.kind.name for instance in World(scenario)}
        self._queue_count = len(set(self._pool_of.values())) + len(scenario.routes)
        self._turn_seconds = longest_turn(scenario)
        self._cold_since: dict[Kind, float] = {}
        self._beside_since: dict[Kind, float] = {}
        self._passed_over: dict[Behind, tuple[frozenset[int], int]] = {}
        """The requests last passed over, and how often in a row."""
        self._passed_over_for: dict[Behind, tuple[frozenset[int], int]] = {}
        """The same for grants to other queues."""
        self._reported_at: dict[str, float] = {}
        self._ledger_read_at = 0.0

    def mesh_changed(self, change: MeshChange, now: float) -> None:
        """Records a mesh change for the scheduler."""
        for candidate in change.candidates:
            self._reported_at[candidate.host] = now
        if change.hosts is not None:
            self._ledger_read_at = now
        if any(candidate.readiness is Readiness.DOWN for candidate in change.candidates):
            self._cold_since.clear()

    def ledger_is_fresh(self, host: str, now: float) -> bool:
        """Whether the ledger was read after the last report from this host."""
        return self._reported_at.get(host, 0.0) < self._ledger_read_at <= now

    def woken(self, candidate: Candidate) -> None:
        """Ends the tracked waits for this load."""
        for kind in tuple(self._cold_since):
            if any(member.name == candidate.model for member in self._targets.members(kind.queue)):
                del self._cold_since[kind]

    def overtaken(self, placed: Request, candidate: Candidate, passed_by: Sequence[Request], now: float) -> str | None:
        """Returns a message if this grant passes over lower classes of its tenant, or lower bands, too often.

        `passed_by`: waiting requests of all queues that may run.
        """
        own, limits = self._queue(placed), self._scenario.limits
        for behind in (Behind.of(own, placed, as_band=False), Behind.of(own, placed, as_band=True)):
            self._passed_over.pop(behind, None)
            self._passed_over_for.pop(behind, None)
        wanted: dict[Kind, bool] = {}
        below: dict[Behind, list[Request]] = {
            each: [] for each in self._passed_over if each.queue == own and each.goes_after(placed)
        }
        for each in passed_by:
            kind = Kind(self._queue(each), each.needs)
            if kind not in wanted:
                wanted[kind] = self._could_take(candidate, kind)
            as_band = BAND_OF[each.spec.priority] > BAND_OF[placed.spec.priority]
            behind = Behind.of(kind.queue, each, as_band=as_band)
            # What waits for another endpoint, such as its session's, wants none of these: `_starved_beside` bounds it.
            wants_it = each.awaited is None or each.awaited.endpoint.key == candidate.key
            if wanted[kind] and wants_it and behind.goes_after(placed):
                below.setdefault(behind, []).append(each)
        for behind, waiting in below.items():
            every, queue = _turn_every(behind.priority, limits), behind.queue
            counts, most = self._passed_over, every + SLACK_GRANTS
            if queue != own:
                counts, most = self._passed_over_for, every * self._queue_count + SLACK_GRANTS
            count = self._count(counts, behind, waiting, now)
            if count > most:
                name = behind.priority.name.lower()
                return f"{name} requests of {queue} were passed over {count} times in a row for {own}"
        return None

    def _count(
        self,
        counts: dict[Behind, tuple[frozenset[int], int]],
        key: Behind,
        waiting: Sequence[Request],
        now: float,
    ) -> int:
        """Returns how often in a row the same requests were passed over, including this time."""
        # The share of durable requests applies from their arrival.
        long_seconds = 0.0 if key.priority is Priority.DURABLE else self._scenario.limits.lower_class_patience_seconds
        is_long = _all_waited(waiting, now, long_seconds)
        patient = frozenset(each.key for each in waiting) if is_long else frozenset[int]()
        before, count = counts.get(key, (frozenset[int](), 0))
        count = (count + 1 if patient & before else 1) if patient else 0
        counts[key] = (patient, count)
        return count

    def starved(self, fresh: Sequence[Request], free: Sequence[Candidate], world: World, now: float) -> str | None:
        """Returns a message if a request has waited too long for a load or beside a free slot; None: none has.

        `fresh`: waiting requests without an attempt that may run.
        """
        kinds = {Kind(self._queue(arrival), arrival.needs) for arrival in fresh}
        # Nothing is ever evicted for durable requests.
        bound = {Kind(self._queue(each), each.needs) for each in fresh if each.spec.priority is not Priority.DURABLE}
        return self._starved_cold(bound, world, now) or self._starved_beside(kinds, free, now)

    def _starved_cold(self, kinds: Collection[Kind], world: World, now: float) -> str | None:
        cold = {kind for kind in kinds if self._is_cold(kind, world)}
        self._cold_since = {kind: self._cold_since.get(kind, now) for kind in cold}
        for kind, since in self._cold_since.items():
            bound = self._cold_bound(kind)
            if now - since > bound:
                return f"nothing was loaded for {kind.queue} for {now - since:.1f} s; the bound is {bound:.1f} s"
        return None

    def _starved_beside(self, kinds: Collection[Kind], free: Sequence[Candidate], now: float) -> str | None:
        if self._scenario.failures:
            # A failed candidate is avoided for a while, although its slots are free.
            return None
        beside = {kind for kind in kinds if any(self._could_take(candidate, kind) for candidate in free)}
        self._beside_since = {kind: self._beside_since.get(kind, now) for kind in beside}
        for kind, since in self._beside_since.items():
            if now - since > self._turn_seconds:
                return f"requests for {kind.queue} waited {now - since:.1f} s beside a free slot"
        return None

    def _could_take(self, candidate: Candidate, kind: Kind) -> bool:
        members = self._targets.members(kind.queue)
        route = self._scenario.routes.get(kind.queue.removeprefix(ROUTE_PREFIX))
        if kind.queue.startswith(ROUTE_PREFIX) and route is not None and route.pin_primary:
            members = tuple(each for each in members if route.candidates[0] in (each.name, each.kind.name))
        return not lacks(candidate, kind.needs) and any(member.name == candidate.model for member in members)

    def _is_cold(self, kind: Kind, world: World) -> bool:
        """Whether it waits for a load that could begin: no member is loaded or loading, and one would fit."""
        members = [
            world.instances[member.name]
            for member in self._targets.members(kind.queue)
            if member.name in self._reported and not lacks(self._reported[member.name], kind.needs)
        ]
        states = {self._reported[member.name].readiness for member in members}
        if not states or states & {Readiness.READY, Readiness.LOADING}:
            return False
        return any(
            self._reported[member.name].readiness is Readiness.ASLEEP and _could_fit(member) for member in members
        )

    def _cold_bound(self, kind: Kind) -> float:
        rivals = max(len(member.host.instances) for member in self._targets.members(kind.queue))
        limits = self._scenario.limits
        return limits.max_cold_wait_seconds + 2 * limits.memory_retry_seconds + rivals * self._turn_seconds

    def _queue(self, arrival: Request) -> str:
        return self._pool_of.get(arrival.spec.model, arrival.spec.model)


def cold_wait_bound(scenario: Scenario, world: World) -> float:
    """Returns the maximum wait for a load on any host in seconds: the scheduler's bound plus a turn per rival."""
    rivals = max((len(host.instances) - 1 for host in world.hosts.values()), default=0)
    return scenario.limits.max_cold_wait_seconds + rivals * longest_turn(scenario)


def _could_fit(instance: Instance) -> bool:
    host = instance.host
    pinned = [other for other in host.instances if other.kind.pinned and other.phase in HOLDS_MEMORY]
    room = host.total_bytes - host.program_bytes - host.unowned_bytes - sum(other.kind.memory_bytes for other in pinned)
    return host.is_up and (not host.has_ledger or instance.kind.memory_bytes <= room)


def _turn_every(band: Priority, limits: SchedulerLimits) -> float:
    """Returns n if one of n grants goes to this class while higher ones have requests; infinity: none does."""
    if band is not Priority.DURABLE:
        return limits.lower_class_every
    return ceil(1.0 / limits.durable_share) if limits.durable_share else inf


def _all_waited(waiting: Sequence[Request], now: float, long_seconds: float) -> bool:
    """Whether there are any, and the first of each tenant has waited longer than `long_seconds`."""
    by_tenant = sorted(waiting, key=lambda each: each.spec.tenant)
    firsts = [min(group, key=_deadline_order) for _, group in groupby(by_tenant, key=lambda each: each.spec.tenant)]
    return bool(firsts) and all(now - first.arrived_at > long_seconds for first in firsts)


def _deadline_order(arrival: Request) -> tuple[float, float, int]:
    deadline_at = inf if arrival.own_deadline_at is None else arrival.own_deadline_at
    return (deadline_at, arrival.arrived_at, arrival.key)


def longest_turn(scenario: Scenario) -> float:
    """Returns an upper bound of a turn: running requests end, a model is evicted, another loads and has its turn."""
    slowest = max([1.0, *(each.factor for each in scenario.failures if each.mode is FailureMode.SLOW)])
    traced = [each for traffic in scenario.traffic for each in traffic.recorded]
    drawn = [each for each in scenario.traffic if not each.recorded]
    prompt = max([each.prompt_tokens.largest_likely for each in drawn] + [each.prompt_tokens for each in traced])
    output = max([each.output_tokens.largest_likely for each in drawn] + [each.output_tokens for each in traced])
    work = max((traffic.work.largest_likely for traffic in scenario.traffic if traffic.work is not None), default=0.0)
    serve = max(
        kind.slots * kind.prefill_seconds(prompt) + kind.answer_seconds(output, work) for kind in scenario.models
    )
    load = slowest * max(kind.load_seconds.largest_likely for kind in scenario.models)
    limits, delays = scenario.limits, scenario.delays
    turn = max(limits.min_turn_seconds, min(limits.swap_quantum_ratio * load, limits.max_cold_wait_seconds))
    reporting = delays.unload_seconds + delays.memory_watch_seconds + 4 * delays.report_seconds
    return slowest * serve + load + turn + reporting + SLACK_SECONDS
