"""Reconciliation of waiting requests with changes of the mesh and of wakes."""

from dataclasses import replace

from router_svc.policy import refusals
from router_svc.policy.decisions import LOST_RUNNER, Decision, Rejects, WakeFailure, Wakes
from router_svc.policy.endpoints.candidates import Candidate, Readiness
from router_svc.policy.endpoints.cluster_view import ClusterView, ViewDelta
from router_svc.policy.endpoints.retry import RetryBudget
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.loading.cold_start_plan import LoadStart
from router_svc.policy.loading.load_coordinator import LoadCoordinator
from router_svc.policy.progress.wait_estimator import WaitEstimator
from router_svc.policy.queue.queue import Queue
from router_svc.policy.queue.queues import Queues
from router_svc.policy.request_table import RequestTable
from router_svc.policy.router_request import Request
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Priority

UNSETTLED = WakeFailure(reason=Reason.WAKE_FAILED, message="it woke but did not report ready")


class Reconciler:
    """Applies changes of the mesh, and beginnings and ends of wakes, to the waiting requests."""

    def __init__(
        self,
        limits: SchedulerLimits,
        cluster: ClusterView,
        queues: Queues,
        loads: LoadCoordinator,
        estimator: WaitEstimator,
        requests: RequestTable,
        retries: RetryBudget,
    ) -> None:
        self._limits = limits
        self._cluster = cluster
        self._index = cluster.index
        self._queues = queues
        self._loads = loads
        self._estimator = estimator
        self._requests = requests
        self._retries = retries

    def follow(self, delta: ViewDelta, now: float) -> list[Decision]:
        """Update queues with changed members: refuse requests without a candidate, update capacities and demands."""
        decisions = self._rename(now) if delta.renames else []
        for name in sorted(delta.queues):
            queue = self._queues.get(name)
            if queue is None:
                continue
            queue.capacities.clear()
            queue.considered.clear()
            queue.unhealthy.clear()
            if queue.waiting:
                decisions += self._look(queue, now)
            elif self._index.table.queue_of(name) != name:
                self._queues.drop(name)
                self._retries.forget(name)
        return decisions

    def no_candidate(self, request: Request) -> Rejects:
        """Return why no candidate can serve the request, now or later."""
        kind, queue = request.kind, request.queue
        if request.last_failure is not None and any(True for _ in self._index.permitted(queue, kind.needs, ())):
            return request.last_failure
        summary = self._index.refusal(queue, kind.needs, request.spec.model)
        return refusals.no_candidate_can(request, summary)

    def is_exhausted(self, request: Request) -> bool:
        """Whether no further attempt is allowed or possible."""
        if request.failures >= self._limits.max_attempts or request.bounces > self._limits.max_bounces:
            return True
        return not self._requests.capacity(request).count

    def is_alone(self, request: Request, candidate: Candidate) -> bool:
        """Whether no other runner can serve the request, so that it waits for the return of this candidate's."""
        members = self._index.permitted(request.queue, request.kind.needs, self._estimator.excluded(request.kind))
        engine = _engine_of(candidate)
        return all(_engine_of(each) == engine for each in members)

    def _look(self, queue: Queue, now: float) -> list[Decision]:
        decisions: list[Decision] = []
        for request_class in tuple(queue.classes.values()):
            capacity = self._estimator.capacity(queue, request_class.kind)
            if capacity.count:
                self._requests.settle_pause(request_class, capacity, now)
                self._loads.note_demand(request_class, capacity)
                continue
            in_vain = map(self._requests.live, request_class.request_keys())
            decisions.extend(self._requests.drop(request, self.no_candidate(request), now) for request in in_vain)
        return decisions

    def _rename(self, now: float) -> list[Decision]:
        """Move requests of targets that resolve to other queues, and refuse those of targets that are gone."""
        decisions: list[Decision] = []
        keys = [key for request_class in self._queues.classes() for key in request_class.request_keys()]
        for request in map(self._requests.live, keys):
            name = self._index.table.queue_of(request.spec.model)
            if name is None:
                rejection = refusals.unknown_target(request)
                decisions.append(self._requests.drop(request, rejection, now))
            elif name != request.queue:
                self._requests.dequeue(request, now)
                request.queue = name
                self._requests.enqueue(request, now)
        return decisions

    def begin(self, start: LoadStart, now: float) -> list[Decision]:
        """Begin a wake. A wake with evictions has priority over all other loads of its host."""
        candidate = start.candidate
        first, request = self._loads.first_for(candidate)
        wakes = Wakes(
            model=candidate.model,
            runner=candidate.runner,
            max_wait_seconds=candidate.max_wake_seconds,
            doubted=self._cluster.is_doubted(candidate),
            priority=Priority.SYSTEM if start.evicts else first,
            why=start.why,
            request=request,
        )
        self._loads.wakes.begin(candidate, now)
        return [wakes, *self._refresh(candidate.model, now)]

    def succeed(self, model: str, now: float, *, self_reported: bool) -> list[Decision]:
        """Record a reported success, which the mesh must confirm unless it is `self_reported` by the runner."""
        self._loads.wakes.note_woken(model, now)
        decisions: list[Decision] = []
        if self_reported:
            delta = self._cluster.apply_self_report(model, Readiness.READY, now)
            decisions += self.follow(delta, now)
        self._loads.note_change()
        return decisions + self.settle(now)

    def settle(self, now: float) -> list[Decision]:
        """End the wakes of models that are ready or overdue."""
        settled = self._loads.wakes.settle(self._cluster.readiness_of, now)
        if settled is None:
            return []
        for candidate, seconds in settled.ready:
            # Use the runner's current value: before its first load it had none.
            usual = self._cluster.usual_load_of(candidate.model) or candidate.usual_load_seconds
            self._estimator.estimates.note_load(replace(candidate, usual_load_seconds=usual), seconds)
        decisions: list[Decision] = []
        for model in settled.loading:
            decisions += self._refresh(model, now)
        for model in settled.unsettled:
            decisions += self.fail(model, UNSETTLED, now)
        self._loads.note_change()
        return decisions

    def fail(self, model: str, failure: WakeFailure, now: float) -> list[Decision]:
        """Refuse requests that waited for this wake and have no alternative.

        Lack of memory refuses no request, unless the host is too small. If the runner cannot be reached, all wait for
        it or another; if it was lost, those that only it can serve.
        """
        decisions: list[Decision] = []
        lacks_memory = failure.reason is Reason.INSUFFICIENT_MEMORY
        too_large = self._cluster.larger_than_its_host(model) if lacks_memory else None
        if lacks_memory and too_large is None:
            self._loads.wakes.note_put_off(model)
            self._loads.note_no_memory(model, now)
        elif (candidate := self._index.table.candidate(model)) is None:
            # It left the mesh, so its history is not stored.
            self._loads.wakes.note_put_off(model)
        else:
            waited = [request_class for request_class in self._queues.classes() if request_class.awaited_wake == model]
            self._loads.wakes.note_failed(model)
            self._loads.note_failed(model, now)
            if failure.reason in LOST_RUNNER:
                self._index.health.note_lost(candidate, now)
            if failure.reason is Reason.RUNNER_UNREACHABLE:
                # Nothing was loaded, so the queue timeout goes on as if no wake had begun.
                for request_class in waited:
                    request_class.end_pause(for_good=False)
                return self._refresh(model, now)
            keys = [key for request_class in waited for key in request_class.request_keys()]
            for request in map(self._requests.live, keys):
                if failure.reason is Reason.WORKER_LOST and self.is_alone(request, candidate):
                    # As of a request that a lost runner served: the third time it may be the cause.
                    request.failures += 1
                    if not self.is_exhausted(request):
                        continue
                if too_large is None:
                    refusal = refusals.wake_failed(request.key, model, failure.message)
                else:
                    refusal = refusals.never_fits(request.key, *too_large)
                decisions += self._wait_for_another(request, model, refusal, now)
        return decisions + self._refresh(model, now)

    def doubt(self, request: Request, candidate: Candidate, now: float) -> list[Decision]:
        """Treat a model as asleep that is shown as ready but repeatedly was not: the view is stale."""
        if not candidate.runner_wakes or request.bounces < self._limits.stale_view_bounces:
            return []
        delta = self._cluster.apply_self_report(candidate.model, Readiness.ASLEEP, now)
        return self.follow(delta, now)

    def _wait_for_another(self, request: Request, model: str, refusal: Rejects, now: float) -> list[Decision]:
        self._requests.dequeue(request, now)
        request.kind = request.kind.not_waking(model)
        request.failures += 1
        request.last_failure = refusal
        if self.is_exhausted(request):
            self._requests.leave(request)
            return [refusal]
        self._requests.enqueue(request, now)
        return []

    def _refresh(self, model: str, now: float) -> list[Decision]:
        return self.follow(self._cluster.refresh(model, now), now)


def _engine_of(candidate: Candidate) -> tuple[str, str]:
    """Return the model that is loaded for a candidate, and its runner."""
    return candidate.base_model or candidate.model, candidate.runner
