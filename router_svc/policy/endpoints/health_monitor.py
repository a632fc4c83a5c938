"""What successes and failures of attempts mean for endpoints: pauses and ejections, and when they end."""

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count
from math import inf

from router_svc.policy.endpoints.candidates import Candidate
from router_svc.policy.endpoints.endpoint_table import EndpointTable
from router_svc.policy.endpoints.failover import FailureKind
from router_svc.policy.endpoints.pool import Endpoint
from router_svc.policy.limits import SchedulerLimits


class PauseEnds:
    """Heap of the ends of pauses and ejections, with lazy deletion; one entry per endpoint is valid."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, int, Endpoint]] = []
        self._numbers = count()
        self.first = inf
        """Time at which `over` must be called next; infinity: there is no end to wait for."""

    def await_end(self, endpoint: Endpoint) -> None:
        """Schedule the next end of an endpoint whose health changed."""
        end = endpoint.health.next_end
        if end is not None and end != endpoint.awaited_end:
            heappush(self._ends, (end, next(self._numbers), endpoint))
            self.first = self._ends[0][0]
        endpoint.awaited_end = end

    def over(self, now: float) -> Iterator[Endpoint]:
        """Yield the endpoints with an end by `now`, each with its health advanced to `now`."""
        while self._ends and self._ends[0][0] <= now:
            endpoint = self._pop()
            endpoint.health.advance(now)
            self.await_end(endpoint)
            yield endpoint

    def next_end(self) -> float | None:
        """Return the earliest end; None: there is none."""
        while self._ends and self._ends[0][0] != self._ends[0][2].health.next_end:
            self._pop()
        return self._ends[0][0] if self._ends else None

    def _pop(self) -> Endpoint:
        endpoint = heappop(self._ends)[2]
        self.first = self._ends[0][0] if self._ends else inf
        return endpoint


class HealthMonitor:
    """Updates the health of endpoints, and ejects those that fail unless they are the last usable one of a queue."""

    def __init__(self, table: EndpointTable, limits: SchedulerLimits) -> None:
        self._table = table
        self._limits = limits
        self._ends = PauseEnds()

    def advance(self, now: float) -> None:
        """End the pauses and ejections that are due by `now`. Every method that takes `now` does this first."""
        if now >= self._ends.first:
            for endpoint in self._ends.over(now):
                self._table.settle(endpoint)

    def wakes_at(self, now: float) -> float | None:
        """Return when the next pause or ejection ends, after which a selection may succeed; None: there is none."""
        self.advance(now)
        return self._ends.next_end()

    def note_content(self, candidate: Candidate, now: float) -> None:
        """Record that an answer of the candidate has begun: it is not full, and it works."""
        self.advance(now)
        endpoint = self._table.by_key.get(candidate.key)
        if endpoint is None:
            return
        health, state = endpoint.health, endpoint.health.state
        endpoint.pool.breaks_in_a_row = 0
        health.note_success(now)
        if health.state is not state:
            self._table.settle(endpoint)
            self._table.note_change(endpoint)

    def note_failure(self, candidate: Candidate, kind: FailureKind, now: float, *, had_begun: bool = False) -> None:
        """Record a failed attempt; `had_begun`: it failed after its first content."""
        self.advance(now)
        endpoint = self._table.by_key.get(candidate.key)
        if endpoint is None:
            return
        endpoint.pool.breaks_in_a_row += kind is FailureKind.BROKE
        # An answer that broke off is not retried: without a replacement, a pause would make others wait for nothing.
        pauses = not had_begun or self._is_replaceable(endpoint)
        if endpoint.health.note_failure(kind, now, had_begun=had_begun, pauses=pauses) and self._is_replaceable(
            endpoint
        ):
            endpoint.health.eject(now)
        self._health_changed(endpoint)

    def note_shared_failure(self, candidate: Candidate, now: float) -> None:
        """Record an engine error for a request that already failed so elsewhere: the request is the common factor.

        The candidate gets further requests at once and the failure does not count towards an ejection, up to
        `max_shared_failures` in a row.
        """
        endpoint = self._table.by_key.get(candidate.key)
        if endpoint is None:
            return
        if endpoint.health.excuses_shared_failure():
            endpoint.pool.breaks_in_a_row += 1
        else:
            self.note_failure(candidate, FailureKind.BROKE, now)

    def take_back_break(self, candidate: Candidate, now: float) -> None:
        """Revoke the last counted failure, which another candidate shared; see `note_shared_failure`."""
        self.advance(now)
        endpoint = self._table.by_key.get(candidate.key)
        if endpoint is None or not endpoint.health.excuses_shared_failure():
            return
        endpoint.health.take_back_break(now)
        self._health_changed(endpoint)

    def is_clean(self, candidate: Candidate, now: float) -> bool:
        """Whether a retry there does not repeat a recent failure.

        The candidate succeeded since its last break; or nothing broke there lately, and its pool is not in an outage.
        """
        endpoint = self._table.by_key.get(candidate.key)
        if endpoint is None or endpoint.health.has_proven_itself:
            return endpoint is not None
        is_outage = endpoint.pool.breaks_in_a_row >= self._limits.eject_after_failures
        return not is_outage and endpoint.health.has_not_failed_lately(now)

    def _health_changed(self, endpoint: Endpoint) -> None:
        self._ends.await_end(endpoint)
        self._table.settle(endpoint)
        self._table.note_change(endpoint)

    def _is_replaceable(self, endpoint: Endpoint) -> bool:
        """Whether each queue of this endpoint has another usable one."""
        return endpoint.group is not None and all(
            any(step.has_other_usable(endpoint) for step in self._table.steps(queue))
            for queue in self._table.queues_of(endpoint.candidate)
        )
