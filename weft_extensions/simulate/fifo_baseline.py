"""The FIFO baseline for comparison: a scheduler without fair shares and swap costs.

Each target has a queue in order of arrival. A request is served if its model is loaded and free. If the first request's
model is not loaded, room is made immediately: the models in its way accept no requests, finish, and are evicted.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from typing_extensions import override

from router_svc.policy.decisions import Decision, Placed, Rejects, Served, Waits, WakeFailure, Wakes
from router_svc.policy.endpoints.candidates import Candidate, CandidateKey, Readiness
from router_svc.policy.endpoints.cluster_view import MeshChange
from router_svc.policy.port import SchedulerPort
from router_svc.policy.router_request import Request
from weft.kernel.errors.failover import FailureKind, classify
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Priority
from weft_extensions.simulate.hosts import Targets, World, lacks
from weft_extensions.simulate.scenario import Scenario

WAKE_PAUSE_SECONDS = 1.0
"""Pause of a model whose load could not begin."""


@dataclass(slots=True, eq=False)
class _Request:
    arrival: Request
    attempt: int
    queued_since: float
    on: Candidate | None = None
    broken_on: set[CandidateKey] = field(default_factory=set)

    @property
    def target(self) -> str:
        return self.arrival.spec.model


class FifoScheduler(SchedulerPort):
    """First come, first served, with the limits of `Scheduler`."""

    def __init__(self, scenario: Scenario) -> None:
        self._limits = scenario.limits
        self._targets = Targets(World(scenario), scenario.routes, cloud_fallback=scenario.cloud_fallback)
        self._candidates: dict[str, Candidate] = {}
        self._requests: dict[int, _Request] = {}
        self._queues: dict[str, dict[int, _Request]] = {}
        self._in_flight: Counter[CandidateKey] = Counter()
        self._on_runner: Counter[tuple[str, ...]] = Counter()
        self._waking: set[str] = set()
        self._paused_until: dict[str, float] = {}
        self._held: dict[str, str] = {}
        """By host, the model that it is drained for."""
        self._free_bytes: dict[str, int] = {}

    @property
    @override
    def waiting(self) -> int:
        return sum(map(len, self._queues.values()))

    @property
    @override
    def running(self) -> int:
        return len(self._requests) - self.waiting

    @override
    def apply(self, change: MeshChange, now: float) -> list[Decision]:
        for candidate in change.candidates:
            self._candidates[candidate.model] = candidate
            if candidate.readiness is Readiness.READY:
                self._waking.discard(candidate.model)
            if candidate.readiness is not Readiness.ASLEEP and self._held.get(candidate.host) == candidate.model:
                del self._held[candidate.host]
        if change.hosts is not None:
            self._free_bytes = {name: host.free_bytes for name, host in change.hosts.items()}
            return self._serve(self._queues, now)
        changed = {candidate.model for candidate in change.candidates}
        return self._serve([name for name in self._queues if changed.intersection(self._models(name))], now)

    @override
    def submit(self, arrival: Request, now: float) -> list[Decision]:
        request = _Request(arrival, arrival.spec.attempts_used, now)
        able, up = self._able(request), self._usable(request)
        queue = self._queues.setdefault(request.target, {})
        if not up:
            return [_refuse(request, Reason.NO_RUNNER_AVAILABLE if able else Reason.PERMISSION_DENIED)]
        self._requests[arrival.key] = queue[arrival.key] = request
        decisions = self._serve([request.target], now)
        if request.on is None and len(queue) > self._limits.queue_depth_per_runner * len(up):
            decisions.append(self._drop(request, Reason.QUEUE_FULL))
        elif request.on is None:
            decisions.append(Waits(key=arrival.key, position=len(queue), reason="earlier requests go first"))
        return decisions

    @override
    def report_first_content(self, key: int, now: float) -> list[Decision]:
        """Does nothing."""
        return []

    @override
    def report_failed(self, key: int, attempt: int, reason: Reason, now: float) -> list[Decision]:
        request = self._requests[key]
        if request.on is None or request.attempt != attempt:
            return []
        kind = classify(reason)
        if kind is FailureKind.BROKE:
            request.broken_on.add(request.on.key)
        self._release(request)
        self._queues[request.target] = {key: request, **self._queues[request.target]}
        decisions: list[Decision] = []
        if kind is FailureKind.FINAL or request.attempt >= self._limits.max_attempts:
            decisions.append(self._drop(request, reason))
        return [*decisions, *self._serve_rivals(request, now)]

    @override
    def finish(
        self, key: int, now: float, served: Served | None = None, failure: Reason | None = None
    ) -> list[Decision]:
        request = self._requests.pop(key, None)
        if request is None:
            return []
        if request.on is None:
            del self._queues[request.target][key]
        else:
            self._release(request)
        return self._serve_rivals(request, now)

    @override
    def wake_finished(
        self, model: str, failure: WakeFailure | None, now: float, *, self_reported: bool = False
    ) -> list[Decision]:
        self._waking.discard(model)
        if failure is not None:
            self._paused_until[model] = now + WAKE_PAUSE_SECONDS
            self._held = {host: other for host, other in self._held.items() if other != model}
        return self._serve(self._queues, now)

    @override
    def opens_at(self, now: float) -> None:
        """It ignores the prompts of engines."""

    @override
    def proceed(self, now: float) -> list[Decision]:
        return []

    @override
    def tick(self, now: float) -> list[Decision]:
        decisions: list[Decision] = []
        # Stop draining hosts for models that no request waits for.
        heads = [next(iter(queue.values())) for queue in self._queues.values() if queue]
        wanted = {each.model for head in heads for each in self._usable(head)}
        self._held = {host: model for host, model in self._held.items() if model in wanted}
        for request in [request for queue in self._queues.values() for request in queue.values()]:
            deadline_at = request.arrival.own_deadline_at
            if deadline_at is not None and now >= deadline_at:
                decisions.append(self._drop(request, Reason.DEADLINE_EXCEEDED))
            elif now - request.queued_since >= self._limits.queue_timeout_seconds:
                decisions.append(self._drop(request, Reason.QUEUE_TIMEOUT))
            elif not self._usable(request):
                decisions.append(self._drop(request, Reason.NO_RUNNER_AVAILABLE))
        return [*decisions, *self._serve(self._queues, now)]

    def _serve_rivals(self, request: _Request, now: float) -> list[Decision]:
        """Serves the target of a request, then all others with waiting requests."""
        others = [other for other, queue in self._queues.items() if queue and other != request.target]
        return self._serve([request.target, *others], now)

    def _serve(self, targets: Iterable[str], now: float) -> list[Decision]:
        decisions: list[Decision] = []
        queues = [self._queues.get(target, {}) for target in targets]
        for queue in queues:
            for request in tuple(queue.values()):
                free = next(filter(self._is_free, self._usable(request)), None)
                if free is None:
                    break
                decisions.append(self._place(request, free))
        heads = [next(iter(queue.values())) for queue in queues if queue]
        for head in sorted(heads, key=lambda request: request.arrival.arrived_at):
            decisions += self._load_for(head, now)
        return decisions

    def _load_for(self, request: _Request, now: float) -> list[Decision]:
        """Loads a model for the first request of a queue, or makes room for it."""
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
                longest, first = each.max_wake_seconds, Priority.SYSTEM
                return [Wakes(model=each.model, runner=each.runner, max_wait_seconds=longest, priority=first)]
        return []

    def _make_room(self, candidate: Candidate) -> bool:
        """Drains its host; returns whether the host is idle."""
        if self._held.setdefault(candidate.host, candidate.model) != candidate.model:
            return False
        return not any(self._in_flight[each.key] for each in self._candidates.values() if each.host == candidate.host)

    def _place(self, request: _Request, candidate: Candidate) -> Placed:
        key = request.arrival.key
        del self._queues[request.target][key]
        request.on = candidate
        request.attempt += 1
        self._in_flight[candidate.key] += 1
        self._on_runner[candidate.key[1:]] += 1
        return Placed(key=key, candidate=candidate, attempt=request.attempt)

    def _release(self, request: _Request) -> None:
        candidate, request.on = request.on, None
        assert candidate is not None, "only a running request has a slot"
        self._in_flight[candidate.key] -= 1
        self._on_runner[candidate.key[1:]] -= 1

    def _drop(self, request: _Request, reason: Reason) -> Rejects:
        del self._queues[request.target][request.arrival.key], self._requests[request.arrival.key]
        return _refuse(request, reason)

    def _models(self, target: str) -> list[str]:
        return [member.name for member in self._targets.members(target)]

    def _able(self, request: _Request) -> list[Candidate]:
        members = [self._candidates[model] for model in self._models(request.target)]
        return [candidate for candidate in members if not lacks(candidate, request.arrival.needs)]

    def _usable(self, request: _Request) -> list[Candidate]:
        able = self._able(request)
        return [each for each in able if each.readiness is not Readiness.DOWN and each.key not in request.broken_on]

    def _is_free(self, candidate: Candidate) -> bool:
        is_held = self._held.get(candidate.host, candidate.model) != candidate.model
        if is_held or candidate.readiness is not Readiness.READY:
            return False
        most = candidate.runner_max_requests
        has_room = not most or self._on_runner[candidate.key[1:]] < most
        return has_room and self._in_flight[candidate.key] < candidate.slots


def _refuse(request: _Request, reason: Reason) -> Rejects:
    return Rejects(key=request.arrival.key, reason=reason, message=reason.name.lower().replace("_", " "))
