"""Invariants of every run with every scheduler, and their checker."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from router_svc.policy.decisions import Decision, Placed, Rejects, StopsWaking, Wakes
from router_svc.policy.endpoints.candidates import Candidate, Readiness
from router_svc.policy.endpoints.cluster_view import MeshChange
from router_svc.policy.limits import TELL_INTERVAL_SECONDS
from router_svc.policy.port import SchedulerPort
from router_svc.policy.router_request import Request
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Priority
from weft_extensions.simulate.hosts import Host, Instance, Phase, Targets, World, lacks
from weft_extensions.simulate.runners import Attempt
from weft_extensions.simulate.scenario import Scenario
from weft_extensions.simulate.starvation import StarvationDetector
from weft_extensions.simulate.traffic import SimulatedRequest

if TYPE_CHECKING:
    from router_svc.policy.endpoints.candidates import HostMemory

CandidateKey = tuple[str, str, str]
LATE_SECONDS = 0.5
"""Tolerance of due times: two ticks."""
_BROKE = frozenset({Reason.SERVER_DIED, Reason.WORKER_LOST})


_IN_MOTION = frozenset({Phase.CLAIMING, Phase.LOADING, Phase.STOPPING})
_OF_QUEUES = frozenset({Reason.QUEUE_FULL, Reason.QUEUE_TIMEOUT})


class InvariantError(AssertionError):
    """An invariant is violated."""


@dataclass(slots=True, kw_only=True)
class TrackedRequest:
    """A request that has not ended, from its caller's view."""

    request: SimulatedRequest
    on: Candidate | None = None
    """Where it runs; None: it waits."""
    waits_since: float
    waited_seconds: float = 0.0
    """Total wait before its last attempts."""
    quiet_since: float = 0.0
    """Start of its wait without any activity on the hosts that could serve it."""
    awaited_until: float = 0.0
    """End of a wake that began within its maximum wait."""
    attempts: int = 0
    unreached: int = 0
    """Attempts without a connection; the queue timeout bounds them."""
    broken_on: set[CandidateKey] = field(default_factory=set)

    @property
    def arrival(self) -> Request:
        """The request as the scheduler knows it."""
        return self.request.arrival


class TargetState(NamedTuple):
    """Activity for the requests of a target."""

    members: tuple[Instance, ...]
    woken_at: float
    """Start of its oldest wake in progress; infinity: none."""
    is_at_work: bool
    """Whether a host of its members claims, loads or stops."""


class InvariantChecker:
    """Tracks a run independently of the scheduler, and raises InvariantError."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._tracked: dict[int, TrackedRequest] = {}
        self._over: set[int] = set()
        self._reported: dict[str, Candidate] = {}
        self._ledgers: Mapping[str, HostMemory] = {}
        self._waking: dict[str, float] = {}
        """Models being woken, with the start time."""
        self._self_reported: set[str] = set()
        self._used_at: dict[str, float] = {}
        """End of the last caller's request by model."""
        self._on_candidate: Counter[CandidateKey] = Counter()
        self._on_runner: Counter[tuple[str, str]] = Counter()
        self._of_tenant: Counter[str] = Counter()
        self._in_pool: Counter[str] = Counter()
        self._targets = Targets(World(scenario), scenario.routes, cloud_fallback=scenario.cloud_fallback)
        self._starvation = StarvationDetector(scenario, self._targets, self._reported)
        self.checked = 0

    # What happens around the scheduler.

    def submitted(self, request: SimulatedRequest, now: float) -> None:
        """Tracks a new request."""
        self._tracked[request.arrival.key] = TrackedRequest(request=request, waits_since=now, quiet_since=now)

    def failed(self, key: int, attempt: Attempt, reason: Reason, now: float) -> None:
        """Tracks an attempt that failed before any content."""
        tracked = self._tracked[key]
        if tracked.on is not None and reason in _BROKE:
            others = tracked.broken_on | {tracked.on.key}
            # A request that was lost with its last runner waits there for its return.
            if reason is not Reason.WORKER_LOST or self._has_candidate(tracked, others):
                tracked.broken_on = others
        tracked.unreached += reason is Reason.RUNNER_UNREACHABLE
        _require(tracked.attempts == attempt.number, f"request {key} gets a failure of an attempt that it did not make")
        self._release(tracked, now)

    def over(self, key: int, reason: Reason | None, now: float) -> None:
        """Tracks the end of a request; None: it was served."""
        _require(key not in self._over, f"request {key} ended twice")
        tracked = self._tracked.pop(key)
        _require(reason is not None or tracked.on is not None, f"request {key} was served without an attempt")
        self._release(tracked, now)
        self._over.add(key)

    def mesh_changed(self, change: MeshChange, now: float) -> None:
        """Tracks a mesh change before the scheduler gets it."""
        for candidate in change.candidates:
            self._reported[candidate.model] = candidate
            self._self_reported.discard(candidate.model)
        if change.hosts is not None:
            self._ledgers = change.hosts
        self._starvation.mesh_changed(change, now)

    def wake_ended(self, model: str) -> None:
        """Tracks the end of a wake."""
        self._waking.pop(model, None)
        self._self_reported.add(model)

    def changed(self, host: Host) -> None:
        """Checks the memory of a host after a state change."""
        if host.has_ledger:
            _require(host.free_bytes() >= 0, f"{host.name} holds {-host.free_bytes()} bytes more than it has")

    # What the scheduler decides.

    def decided(self, decision: Decision, now: float) -> None:
        """Checks a decision before it is carried out."""
        self.checked += 1
        if isinstance(decision, Wakes):
            self._check_wake(decision, now)
            return
        if isinstance(decision, StopsWaking):
            _require(decision.model in self._waking, f"{decision.model} is given up without a wake")
            return
        key = decision.key
        _require(key not in self._over, f"a decision about request {key}, which has ended")
        _require(key in self._tracked, f"a decision about request {key}, which never arrived")
        tracked = self._tracked[key]
        _require(tracked.on is None, f"a decision about request {key}, which runs on {tracked.on}")
        if isinstance(decision, Placed):
            self._check_place(decision, tracked, now)
            self._take(tracked, decision, now)
        elif isinstance(decision, Rejects):
            self._check_refusal(decision, tracked, now)

    def ticked(self, scheduler: SchedulerPort, world: World, now: float) -> None:
        """Checks every waiting request."""
        waiting = [tracked for tracked in self._tracked.values() if tracked.on is None]
        running = len(self._tracked) - len(waiting)
        _require(scheduler.waiting == len(waiting), f"{scheduler.waiting} are reported as waiting, {len(waiting)} wait")
        _require(scheduler.running == running, f"{scheduler.running} are reported as running, {running} run")
        targets: dict[str, TargetState] = {}
        for tracked in waiting:
            arrival = tracked.arrival
            if arrival.own_deadline_at is not None and now > arrival.own_deadline_at + LATE_SECONDS:
                raise InvariantError(f"request {arrival.key} waits beyond its deadline")
            target = targets.get(arrival.spec.model)
            if target is None:
                target = targets[arrival.spec.model] = self._state_of(arrival.spec.model, world)
            self._require_candidate(tracked, target, now)
            if arrival.spec.priority is not Priority.DURABLE:
                self._require_wait_bound(tracked, target, now)
        free = [candidate for candidate in self._reported.values() if self._has_room(candidate)]
        fresh = [tracked.arrival for tracked in waiting if self._may_run_anywhere(tracked)]
        found = self._starvation.starved(fresh, free, world, now)
        _require(found is None, found or "")

    def ended(self, scheduler: SchedulerPort, world: World, left: Collection[int]) -> None:
        """Checks the end of the run."""
        _require(not left and not self._tracked, f"requests {sorted(self._tracked)[:8]} were never over")
        _require(scheduler.waiting == 0, f"{scheduler.waiting} wait at the end")
        _require(scheduler.running == 0, f"{scheduler.running} slots are still taken at the end")
        working = [instance.name for instance in world if instance.active]
        _require(not working, f"{working} still work at the end")

    def _check_place(self, placed: Placed, tracked: TrackedRequest, now: float) -> None:
        key, candidate, arrival = placed.key, placed.candidate, tracked.arrival
        reported = self._reported.get(candidate.model)
        _require(
            reported is not None and reported.key == candidate.key,
            f"request {key} is placed on {candidate.key}: unknown",
        )
        ready = reported is not None and reported.readiness is Readiness.READY
        _require(
            ready or candidate.model in self._self_reported, f"request {key} is placed on {candidate.model}: not ready"
        )
        members = {member.name for member in self._targets.members(arrival.spec.model)}
        _require(candidate.model in members, f"request {key} for {arrival.spec.model} is placed on {candidate.model}")
        why = lacks(self._reported[candidate.model], arrival.needs)
        _require(not why, f"request {key} is placed on {candidate.model}: {why}")
        _require(candidate.key not in tracked.broken_on, f"request {key} goes again where it broke: {candidate.model}")
        _require(placed.attempt == tracked.attempts + 1, f"request {key}: attempt {placed.attempt} is out of turn")
        limits = self._scenario.limits
        most = limits.max_attempts + limits.max_bounces + tracked.unreached
        _require(placed.attempt <= most + 1, f"request {key} is tried without end")
        deadline_at = arrival.own_deadline_at
        late = deadline_at is not None and now > deadline_at + LATE_SECONDS
        _require(not late, f"request {key} is placed after its deadline")
        waiting = [each for each in self._tracked.values() if each.on is None and each is not tracked]
        passed_by = [each.arrival for each in waiting if self._may_run_anywhere(each)]
        overtaken = self._starvation.overtaken(arrival, self._reported[candidate.model], passed_by, now)
        _require(overtaken is None, overtaken or "")

    def _check_refusal(self, rejects: Rejects, tracked: TrackedRequest, now: float) -> None:
        key, arrival, limits = rejects.key, tracked.arrival, self._scenario.limits
        is_shed = arrival.spec.priority is Priority.DURABLE and rejects.reason in _OF_QUEUES
        _require(not is_shed, f"durable request {key} is refused: {rejects.reason.name.lower()}")
        if rejects.reason is Reason.QUEUE_TIMEOUT:
            waited = now - arrival.arrived_at
            _require(waited >= limits.queue_timeout_seconds - 1e-6, f"request {key} timed out after {waited:.2f} s")
        elif rejects.reason is Reason.DEADLINE_EXCEEDED:
            passed = arrival.own_deadline_at is not None or tracked.request.deadline_at is not None
            _require(passed, f"request {key} without a deadline missed it")
        elif rejects.reason is Reason.DEADLINE_UNREACHABLE:
            _require(tracked.request.deadline_at is not None, f"request {key} without a deadline cannot reach it")
        elif rejects.reason is Reason.MODEL_NOT_FOUND:
            _require(not self._targets.members(arrival.spec.model), f"{arrival.spec.model} is reported as unknown")

    def _check_wake(self, wakes: Wakes, now: float) -> None:
        model = wakes.model
        _require(model not in self._waking, f"{model} is woken twice")
        _require(model in self._reported, f"{model} is woken, and is unknown")
        self._waking[model] = now
        candidate = self._reported[model]
        ledger = self._ledgers.get(candidate.host)
        if ledger is not None and candidate.memory_bytes and candidate.readiness is Readiness.ASLEEP:
            evictable = [
                each
                for each in ledger.holders
                if each.is_model and not each.pinned and not each.unowned and not self._works(each.name)
            ]
            room = ledger.free_bytes + sum(holder.held_bytes for holder in evictable)
            # The ledger may be older than the runners' last reports.
            fresh = self._starvation.ledger_is_fresh(candidate.host, now)
            _require(room >= candidate.memory_bytes or not fresh, f"{model} is woken where it cannot fit")
            staying = (each for each in evictable if not each.is_leaving)
            kept = sum(holder.held_bytes for holder in staying if self._is_of_callers(holder.name, now))
            forced = fresh and self._wanted_only_by_durable(model) and room - kept < candidate.memory_bytes
            _require(not forced, f"{model} is woken for durable requests in the place of what callers use")
        self._starvation.woken(candidate)

    def _wanted_only_by_durable(self, model: str) -> bool:
        bands = {
            tracked.arrival.spec.priority
            for tracked in self._tracked.values()
            if tracked.on is None and self._is_member(model, tracked.arrival.spec.model)
        }
        return bands == {Priority.DURABLE}

    def _is_of_callers(self, model: str, now: float) -> bool:
        """Whether a caller's request runs on it or waits for it, or ended within `durable_idle_seconds`."""
        if now - self._used_at.get(model, -inf) < self._scenario.limits.durable_idle_seconds - 1e-6:
            return True
        return any(
            each.on.model == model if each.on is not None else self._is_member(model, each.arrival.spec.model)
            for each in self._tracked.values()
            if each.arrival.spec.priority is not Priority.DURABLE
        )

    def _is_member(self, model: str, target: str) -> bool:
        return any(member.name == model for member in self._targets.members(target))

    def _works(self, model: str) -> bool:
        return any(count for key, count in self._on_candidate.items() if key[0] == model)

    def _take(self, tracked: TrackedRequest, placed: Placed, now: float) -> None:
        candidate, tenant = self._reported[placed.candidate.model], tracked.arrival.spec.tenant
        tracked.on, tracked.attempts = candidate, placed.attempt
        tracked.waited_seconds += now - tracked.waits_since
        self._on_candidate[candidate.key] += 1
        self._on_runner[_runner(candidate)] += 1
        self._of_tenant[tenant] += 1
        self._in_pool[candidate.pool] += 1
        settings = self._scenario.settings
        _require_at_most(self._on_candidate[candidate.key], candidate.slots, f"slots of {candidate.model}")
        _require_at_most(
            self._on_runner[_runner(candidate)], candidate.runner_max_requests, f"requests of {candidate.runner}"
        )
        _require_at_most(self._of_tenant[tenant], settings.tenant(tenant).max_in_flight, f"requests of {tenant}")
        pool = candidate.pool
        _require_at_most(self._in_pool[pool], settings.pool(pool).max_in_flight, f"requests in {pool}")

    def _release(self, tracked: TrackedRequest, now: float) -> None:
        candidate = tracked.on
        tracked.on, tracked.waits_since, tracked.quiet_since = None, now, now
        if candidate is not None:
            if tracked.arrival.spec.priority is not Priority.DURABLE:
                self._used_at[candidate.model] = now
            self._on_candidate[candidate.key] -= 1
            self._on_runner[_runner(candidate)] -= 1
            self._of_tenant[tracked.arrival.spec.tenant] -= 1
            self._in_pool[candidate.pool] -= 1

    def _state_of(self, target: str, world: World) -> TargetState:
        members = self._targets.members(target)
        hosts = {member.host.name for member in members}
        return TargetState(
            members=members,
            woken_at=min((self._waking.get(member.name, inf) for member in members), default=inf),
            is_at_work=any(_is_at_work(host) for host in world.hosts.values() if host.name in hosts),
        )

    def _require_candidate(self, tracked: TrackedRequest, target: TargetState, now: float) -> None:
        """Checks that some candidate can still serve it."""
        if target.woken_at < inf or now - tracked.waits_since < LATE_SECONDS:
            return
        if not self._has_candidate(tracked, tracked.broken_on):
            raise InvariantError(f"request {tracked.arrival.key} waits, and no candidate can ever serve it")

    def _has_candidate(self, tracked: TrackedRequest, broken_on: Collection[CandidateKey]) -> bool:
        """Whether a candidate that is not down can serve it, other than these."""
        return any(
            reported.readiness is not Readiness.DOWN
            and reported.key not in broken_on
            and not lacks(reported, tracked.arrival.needs)
            for member in self._targets.members(tracked.arrival.spec.model)
            if (reported := self._reported.get(member.name)) is not None
        )

    def _require_wait_bound(self, tracked: TrackedRequest, target: TargetState, now: float) -> None:
        """Checks that no caller waits beyond the bounds, nor beyond the queue timeout without any progress."""
        limits, key = self._scenario.limits, tracked.arrival.key
        if target.woken_at < inf or target.is_at_work:
            tracked.quiet_since = now
        slack = limits.wake_settle_seconds + TELL_INTERVAL_SECONDS + 2 * LATE_SECONDS
        quiet, longest_quiet = now - tracked.quiet_since, limits.queue_timeout_seconds + slack
        if quiet > longest_quiet:
            raise InvariantError(f"request {key} waits {quiet:.1f} s and nothing continues for it")
        most = limits.queue_timeout_seconds + limits.max_load_pause_seconds
        waited = tracked.waited_seconds + now - tracked.waits_since
        if target.woken_at < now - waited + most:
            tracked.awaited_until = now
        if waited > most + slack and now > tracked.awaited_until + longest_quiet:
            raise InvariantError(f"request {key} waits {waited:.1f} s; the bound is {most:.1f} s")

    def _may_run_anywhere(self, tracked: TrackedRequest) -> bool:
        """Whether it could have taken a slot that another request got; after an attempt it may be paused."""
        return not tracked.attempts and self._may_run(tracked)

    def _may_run(self, tracked: TrackedRequest) -> bool:
        """Whether its tenant is below its concurrency limit."""
        cap = self._scenario.settings.tenant(tracked.arrival.spec.tenant).max_in_flight
        return not cap or self._of_tenant[tracked.arrival.spec.tenant] < cap

    def _has_room(self, candidate: Candidate) -> bool:
        cap = self._scenario.settings.pool(candidate.pool).max_in_flight
        on_runner, most = self._on_runner[_runner(candidate)], candidate.runner_max_requests
        return (
            candidate.readiness is Readiness.READY
            and self._on_candidate[candidate.key] < candidate.slots
            and (not most or on_runner < most)
            and (not cap or self._in_pool[candidate.pool] < cap)
        )


def _is_at_work(host: Host) -> bool:
    return any(each.active or each.phase in _IN_MOTION for each in host.instances)


def _runner(candidate: Candidate) -> tuple[str, str]:
    return (candidate.runner, candidate.incarnation)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvariantError(message)


def _require_at_most(count: int, limit: int, what: str) -> None:
    _require(not limit or count <= limit, f"{count} of {limit} {what} are taken")
