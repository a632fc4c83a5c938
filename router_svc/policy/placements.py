"""Requests that run: who pays for them, what was learned when they end."""

from router_svc.policy.decisions import Placed, Served
from router_svc.policy.endpoints.candidates import Candidate
from router_svc.policy.endpoints.choice import Choice
from router_svc.policy.endpoints.cluster_view import ClusterView
from router_svc.policy.endpoints.failover import FailureKind, RetryBudget, classify, may_be_the_requests
from router_svc.policy.estimates import Estimates
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.loading.load_coordinator import LoadCoordinator
from router_svc.policy.progress.wait_estimator import RunningRequests
from router_svc.policy.queue.live_request import LiveRequest
from router_svc.policy.queue.queues import Queues
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation


class Placements:
    """Takes slots and gives them back, with all that hangs on it."""

    def __init__(
        self,
        limits: SchedulerLimits,
        cluster: ClusterView,
        queues: Queues,
        loads: LoadCoordinator,
        estimates: Estimates,
        running: RunningRequests,
    ) -> None:
        self._index = cluster.index
        self._queues = queues
        self._loads = loads
        self._estimates = estimates
        self._running = running
        self.retries = RetryBudget(limits)

    def may_try(self, request: LiveRequest, candidate: Candidate, now: float) -> bool:
        """Whether the attempt is a first one, or its line has a further one left."""
        if not request.is_retry:
            return True
        return self.retries.allow(request.queue, self._index.health.is_clean(candidate, now), now)

    def place(self, request: LiveRequest, choice: Choice, now: float) -> Placed:
        """It runs there from now on."""
        candidate, tenant = choice.candidate, request.arrival.tenant
        if request.attempt == request.arrival.attempts_used:
            self.retries.note_first_attempt(request.queue, now)
        request.attempt += 1
        request.placed_on, request.placed_at, request.content_at = candidate, now, None
        request.last_status, request.holds_slot = None, True
        request.charged = self._queues.shares.charge(tenant, request.cost)
        self._queues.caps.take(tenant)
        self._index.take(candidate, now)
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

    def place_beside(self, request: LiveRequest, candidate: Candidate, now: float) -> Placed:
        """It works there beside those who hold slots: it costs its tenant nothing, and nobody waits because of it."""
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

    def note_content(self, request: LiveRequest, now: float) -> None:
        """Its answer has begun."""
        if request.placed_on is not None and request.content_at is None:
            request.content_at = now
            self._index.health.note_content(request.placed_on, now)

    def take_back(self, request: LiveRequest, now: float) -> tuple[Candidate, bool]:
        """Its attempt failed and cost its tenant nothing. Returns where it ran, and what `_release` does."""
        return self._release(request, 0.0, now)

    def note_failed(self, request: LiveRequest, candidate: Candidate, reason: Reason, now: float) -> None:
        """What an attempt that failed before any content says about its candidate."""
        if not may_be_the_requests(reason):
            self._index.health.note_failure(candidate, classify(reason), now)
            return
        request.erred_on = (*request.erred_on, candidate)
        match request.erred_on:
            case (_,):
                self._index.health.note_failure(candidate, classify(reason), now)
            case (first, _):
                self._index.health.take_back_break(first, now)
                self._index.health.note_shared_failure(candidate, now)
            case _:
                self._index.health.note_shared_failure(candidate, now)

    def end(self, request: LiveRequest, served: Served | None, failure: Reason | None, now: float) -> bool:
        """It is over. Returns whether its tenant may have more running only now.

        An answer that broke off counts against its runner, and teaches nothing: its length says when it broke.
        """
        tokens = _tokens_of(request, served)
        content_at = request.content_at
        candidate, is_relieved = self._release(request, tokens, now)
        if failure is not None and classify(failure) is FailureKind.BROKE:
            self._index.health.note_failure(candidate, FailureKind.BROKE, now, had_begun=content_at is not None)
        elif request.kind.needs.operation is Operation.TOKENIZE:
            pass  # it says nothing about how long work takes there, nor whether there is room for any
        elif served is not None and failure is None:
            first = None if content_at is None else content_at - request.placed_at
            seconds = now - request.placed_at
            arrival = request.arrival
            self._estimates.note_served(
                candidate, arrival.tenant, served, seconds, first, limit=arrival.max_output_tokens
            )
            if content_at is None:
                self._index.health.note_content(candidate, now)
        return is_relieved

    def _release(self, request: LiveRequest, tokens: float, now: float) -> tuple[Candidate, bool]:
        candidate, tenant = request.placed_on, request.arrival.tenant
        assert candidate is not None, "only a placed request holds a slot"
        request.placed_on = None
        if not request.holds_slot:
            return candidate, False
        self._queues.shares.correct(tenant, request.charged, tokens)
        is_relieved = self._queues.caps.release(tenant)
        self._index.release(candidate)
        self._running.remove(request, candidate)
        self._loads.note_release(candidate, now, durable=request.kind.durable)
        return candidate, is_relieved


def _tokens_of(request: LiveRequest, served: Served | None) -> float:
    """What it cost. Where nobody says, nothing before its first content, and as much as was thought after it."""
    if served is None:
        return request.charged if request.content_at is not None else 0.0
    return float(max(0, served.prompt_tokens - served.cached_tokens) + served.output_tokens)
