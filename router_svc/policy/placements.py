"""Placements: requests that run, what they cost their tenants, and what their ends teach."""

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
    """Takes and releases slots, with the accounts, caps, estimates and retry budgets that follow from that."""

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
        """Whether the attempt is a first one, or the retry budget of its queue permits it."""
        if not request.is_retry:
            return True
        return self.retries.allow(request.queue, self._index.health.is_clean(candidate, now), now)

    def place(self, request: LiveRequest, choice: Choice, now: float) -> Placed:
        """Place the request on the chosen candidate."""
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

    def note_content(self, request: LiveRequest, now: float) -> None:
        """Record that the answer has begun."""
        if request.placed_on is not None and request.content_at is None:
            request.content_at = now
            self._index.health.note_content(request.placed_on, now)

    def take_back(self, request: LiveRequest, now: float) -> tuple[Candidate, bool]:
        """Release the slot of a failed attempt, which costs its tenant nothing.

        Returns the candidate, and whether its tenant was at its cap.
        """
        return self._release(request, 0.0, now)

    def note_failed(self, request: LiveRequest, candidate: Candidate, reason: Reason, now: float) -> None:
        """Record what an attempt that failed before any content says about its candidate."""
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
        """End a request. Returns whether its tenant was at its cap.

        An answer that broke off counts against its runner and is not measured: its length says only when it broke.
        """
        tokens = _tokens_of(request, served)
        content_at = request.content_at
        candidate, is_relieved = self._release(request, tokens, now)
        if failure is not None and classify(failure) is FailureKind.BROKE:
            self._index.health.note_failure(candidate, FailureKind.BROKE, now, had_begun=content_at is not None)
        elif request.kind.needs.operation is Operation.TOKENIZE:
            pass  # it says nothing about the duration of work there, nor about free slots
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
    """Return its cost in tokens; if unknown, the estimate after its first content and nothing before it."""
    if served is None:
        return request.charged if request.content_at is not None else 0.0
    return float(max(0, served.prompt_tokens - served.cached_tokens) + served.output_tokens)
