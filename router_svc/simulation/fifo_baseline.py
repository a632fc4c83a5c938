"""The FIFO baseline: a scheduler without fair shares and without swap costs, to compare figures with.

Each target has a queue in order of arrival. A request whose model is loaded and free is served; for the first one whose
model is not, room is made at once: the models in its way take nothing new, finish, and are evicted.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from router_svc.policy.decisions import Decision, Placed, Rejects, Served, Waits, WakeFailure, Wakes
from router_svc.policy.endpoints.candidates import Candidate, Readiness
from router_svc.policy.endpoints.cluster_view import MeshChange
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.request import Request
from router_svc.simulation.hosts import lacks
from weft.kernel.failures import FailureKind, classify
from weft.kernel.names import ROUTE_PREFIX
from weft.kernel.reasons import Reason
from weft.kernel.request import Priority

if TYPE_CHECKING:
    from router_svc.policy.endpoints.routes import Route

WAKE_PAUSE_SECONDS = 1.0
"""Pause of a model after its load could not begin."""
_Key = tuple[str, str, str]


@dataclass(slots=True, eq=False)
class _Request:
    arrival: Request
    attempt: int
    queued_since: float
    on: Candidate | None = None
    broken_on: set[_Key] = field(default_factory=set)


class FifoScheduler:
    """First come, first served, with the methods and the limits of `Scheduler`."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._candidates: dict[str, Candidate] = {}
        self._members: dict[str, dict[str, None]] = {}
        self._routes: dict[str, Route] = {}
        self._cloud_fallback = True
        self._requests: dict[int, _Request] = {}
        self._queues: dict[str, dict[int, _Request]] = {}
        self._in_flight: Counter[_Key] = Counter()
        self._on_runner: Counter[tuple[str, str]] = Counter()
        self._ready_free: dict[str, dict[str, None]] = {}
        self._waking: set[str] = set()
        self._paused_until: dict[str, float] = {}
        self._held: dict[str, str] = {}
        """Models that hosts are drained for, by host."""
        self._free_bytes: dict[str, int] = {}
        self._last_used: dict[str, float] = {}
        self.waiting = 0
        self.running = 0

    def apply(self, change: MeshChange, now: float) -> list[Decision]:
        """Implements `Scheduler.apply`."""
        for candidate in change.candidates:
            self._candidates[candidate.model] = candidate
            self._members.setdefault(candidate.pool, {})[candidate.model] = None
            if candidate.readiness is Readiness.READY:
                self._waking.discard(candidate.model)
            if candidate.readiness is not Readiness.ASLEEP and self._held.get(candidate.host) == candidate.model:
                del self._held[candidate.host]
        if change.hosts is not None:
            self._free_bytes = {name: host.free_bytes for name, host in change.hosts.items()}
        self._routes |= change.routes or {}
        if change.cloud_fallback is not None:
            self._cloud_fallback = change.cloud_fallback
        targets = list(self._queues) if change.hosts is not None else self._targets_of(change.candidates)
        return self._serve(targets, now)

    def submit(self, arrival: Request, now: float) -> list[Decision]:
        """Implements `Scheduler.submit`."""
        able = self._able(arrival)
        up = [candidate for candidate in able if candidate.readiness is not Readiness.DOWN]
        queue = self._queues.setdefault(arrival.spec.model, {})
        if not up:
            return [_refuse(arrival, Reason.NO_RUNNER_AVAILABLE if able else Reason.PERMISSION_DENIED)]
        request = _Request(arrival, arrival.spec.attempts_used, now)
        self._requests[arrival.key] = request
        queue[arrival.key] = request
        self.waiting += 1
        decisions = self._serve([arrival.spec.model], now)
        if request.on is None and len(queue) > self._limits.queue_depth_per_runner * len(up):
            decisions.append(self._drop(request, Reason.QUEUE_FULL))
        elif request.on is None and arrival.key in self._requests:
            decisions.append(Waits(key=arrival.key, position=len(queue), reason="earlier requests go first"))
        return decisions

    def report_first_content(self, key: int, now: float) -> None:
        """Implements `Scheduler.report_first_content`."""

    def report_failed(self, key: int, attempt: int, reason: Reason, now: float) -> list[Decision]:
        """Implements `Scheduler.report_failed`."""
        request = self._requests[key]
        if request.on is None or request.attempt != attempt:
            return []
        if classify(reason) is FailureKind.BROKE:
            request.broken_on.add(request.on.key)
        target = request.arrival.spec.model
        self._release(request)
        self._queues[target] = {key: request, **self._queues[target]}
        self.waiting += 1
        if classify(reason) is FailureKind.FINAL or request.attempt >= self._limits.max_attempts:
            return [self._drop(request, reason), *self._serve(self._rivals(target), now)]
        return self._serve(self._rivals(target), now)

    def finish(
        self,
        key: int,
        now: float,
        served: Served | None = None,  # noqa: ARG002 - the port
        failure: Reason | None = None,  # noqa: ARG002 - the port
    ) -> list[Decision]:
        """Implements `Scheduler.finish`."""
        request = self._requests.get(key)
        if request is None:
            return []
        if request.on is None:
            self._forget(request)
        else:
            self._last_used[request.on.model] = now
            self._release(request)
            del self._requests[key]
        return self._serve(self._rivals(request.arrival.spec.model), now)

    def wake_finished(
        self,
        model: str,
        failure: WakeFailure | None,
        now: float,
        *,
        self_reported: bool = False,  # noqa: ARG002 - the port
    ) -> list[Decision]:
        """Implements `Scheduler.wake_finished`."""
        self._waking.discard(model)
        if failure is not None:
            self._paused_until[model] = now + WAKE_PAUSE_SECONDS
            self._held = {host: other for host, other in self._held.items() if other != model}
        return self._serve(list(self._queues), now)

    def tick(self, now: float) -> list[Decision]:
        """Implements `Scheduler.tick`."""
        decisions: list[Decision] = []
        self._drop_holds()
        for queue in self._queues.values():
            for request in tuple(queue.values()):
                deadline_at = request.arrival.own_deadline_at
                if deadline_at is not None and now >= deadline_at:
                    decisions.append(self._drop(request, Reason.DEADLINE_EXCEEDED))
                elif now - request.queued_since >= self._limits.queue_timeout_seconds:
                    decisions.append(self._drop(request, Reason.QUEUE_TIMEOUT))
                elif not self._usable(request):
                    decisions.append(self._drop(request, Reason.NO_RUNNER_AVAILABLE))
        return [*decisions, *self._serve(list(self._queues), now)]

    def _serve(self, targets: Iterable[str], now: float) -> list[Decision]:
        decisions: list[Decision] = []
        for target in targets:
            queue = self._queues.get(target, {})
            for request in tuple(queue.values()):
                free = next((each for each in self._usable(request) if self._is_free(each)), None)
                if free is None:
                    break
                decisions.append(self._place(request, free, now))
        heads = [next(iter(self._queues[target].values())) for target in targets if self._queues.get(target)]
        for head in sorted(heads, key=lambda request: request.arrival.arrived_at):
            decisions += self._load_for(head, now)
        return decisions

    def _load_for(self, request: _Request, now: float) -> list[Decision]:
        """Loads what the first request of a queue needs, or makes room for it."""
        usable = self._usable(request)
        if any(each.readiness is Readiness.LOADING or each.model in self._waking for each in usable):
            return []
        is_cold = not any(each.readiness is Readiness.READY for each in usable)
        for each in usable:
            if each.readiness is not Readiness.ASLEEP or self._paused_until.get(each.model, 0.0) > now:
                continue
            fits = each.memory_bytes <= self._free_bytes.get(each.host, each.memory_bytes)
            if fits or (is_cold and self._make_room(each)):
                self._waking.add(each.model)
                return [self._wakes(each)]
        return []

    def _make_room(self, candidate: Candidate) -> bool:
        """Drains its host; returns whether the host is idle."""
        holder = self._held.setdefault(candidate.host, candidate.model)
        if holder != candidate.model:
            return False
        others = (each for each in self._candidates.values() if each.host == candidate.host)
        return not any(self._in_flight[each.key] for each in others)

    def _drop_holds(self) -> None:
        """Ends the drain of hosts for models that no request waits for any more."""
        heads = [next(iter(queue.values())) for queue in self._queues.values() if queue]
        wanted = {each.model for head in heads for each in self._usable(head)}
        self._held = {host: model for host, model in self._held.items() if model in wanted}

    def _wakes(self, candidate: Candidate) -> Wakes:
        return Wakes(
            model=candidate.model,
            runner=candidate.runner,
            max_wait_seconds=candidate.max_wake_seconds,
            priority=Priority.SYSTEM,
        )

    def _place(self, request: _Request, candidate: Candidate, now: float) -> Placed:
        del self._queues[request.arrival.spec.model][request.arrival.key]
        self.waiting -= 1
        self.running += 1
        request.on = candidate
        request.attempt += 1
        self._in_flight[candidate.key] += 1
        self._on_runner[candidate.runner, candidate.incarnation] += 1
        self._last_used[candidate.model] = now
        return Placed(key=request.arrival.key, candidate=candidate, attempt=request.attempt)

    def _release(self, request: _Request) -> None:
        candidate = request.on
        assert candidate is not None, "only a running request has a slot"
        request.on = None
        self.running -= 1
        self._in_flight[candidate.key] -= 1
        self._on_runner[candidate.runner, candidate.incarnation] -= 1

    def _drop(self, request: _Request, reason: Reason) -> Rejects:
        self._forget(request)
        return _refuse(request.arrival, reason)

    def _forget(self, request: _Request) -> None:
        del self._queues[request.arrival.spec.model][request.arrival.key]
        del self._requests[request.arrival.key]
        self.waiting -= 1

    def _able(self, arrival: Request) -> list[Candidate]:
        members = [self._candidates[model] for model in self._members_of(arrival.spec.model)]
        return [candidate for candidate in members if not lacks(candidate, arrival.needs)]

    def _usable(self, request: _Request) -> list[Candidate]:
        return [
            each
            for each in self._able(request.arrival)
            if each.readiness is not Readiness.DOWN and each.key not in request.broken_on
        ]

    def _is_free(self, candidate: Candidate) -> bool:
        is_held = self._held.get(candidate.host, candidate.model) != candidate.model
        if is_held or candidate.readiness is not Readiness.READY:
            return False
        on_runner = self._on_runner[candidate.runner, candidate.incarnation]
        has_room = not candidate.runner_max_requests or on_runner < candidate.runner_max_requests
        return has_room and self._in_flight[candidate.key] < candidate.slots

    def _members_of(self, target: str) -> list[str]:
        if not target.startswith(ROUTE_PREFIX):
            return self._named(target)
        route = self._routes.get(target.removeprefix(ROUTE_PREFIX))
        found: dict[str, None] = {}
        for position, name in enumerate(route.candidates if route is not None else ()):
            entry = list(self._members[name]) if name in self._members else [name] * (name in self._candidates)
            may_leave = not position or self._cloud_fallback
            found |= dict.fromkeys(each for each in entry if may_leave or not self._candidates[each].remote)
        return list(found)

    def _named(self, target: str) -> list[str]:
        if target in self._members:
            return list(self._members[target])
        known = self._candidates.get(target)
        return [] if known is None else list(self._members[known.pool])

    def _targets_of(self, candidates: Iterable[Candidate]) -> list[str]:
        changed = {candidate.model for candidate in candidates}
        return [target for target in self._queues if changed.intersection(self._members_of(target))]

    def _rivals(self, target: str) -> list[str]:
        """Returns the target and every other one with waiting requests."""
        others = [other for other, queue in self._queues.items() if queue and other != target]
        return [target, *others]


def _refuse(arrival: Request, reason: Reason) -> Rejects:
    return Rejects(key=arrival.key, reason=reason, message=reason.name.lower().replace("_", " "))
