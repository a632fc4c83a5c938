"""Which waiting request of a tenant is placed next, and which endpoint each of the others waits for.

Each request waits for the endpoint with the lowest expected time to its first token, counting what waits there before
it. It is compared with all endpoints again when that endpoint takes a prompt, and from time to time. The order at an
endpoint is that of `rank_of`; a request is passed over at most MAX_PASSED_OVER times.
"""

from collections.abc import Iterator

from router_svc.policy.endpoints.candidate_index import CandidateIndex
from router_svc.policy.endpoints.load_balancer import NOTHING_AHEAD, Ahead, BestEndpoint
from router_svc.policy.progress.wait_estimator import WaitEstimator
from router_svc.policy.queue.queues import Queues
from router_svc.policy.queue.waiting_prompts import WaitingPrompts
from router_svc.policy.router_request import Request

MAX_DECIDED = 64
"""Requests of a tenant that arrived since the last time and are compared with the endpoints at a time."""
MAX_DECIDED_AGAIN = 4
"""Waiting requests of a tenant that are compared again at a time, those that were compared longest ago first."""
MAX_PASSED_OVER = 16
"""Maximum later requests of its tenant that may be placed before a request because of their shorter prefill."""


class PromptOrder:
    """Orders the waiting requests of pools with the policy `first_token`."""

    def __init__(self, index: CandidateIndex, queues: Queues, estimator: WaitEstimator) -> None:
        self._index = index
        self._queues = queues
        self._estimator = estimator

    def next(self, prompts: WaitingPrompts, first: Request, now: float) -> tuple[Request, BestEndpoint] | None:
        """Return the request of a tenant that is placed next, on its best endpoint; None: those take no prompt now.

        `first`: the request in turn by deadline and arrival.
        """
        others = self._queues.open(first.queue).tenants_waiting - 1
        for request, ahead in self._candidates(prompts, first, others, now):
            best = self._decide(request, prompts, ahead, now)
            if best is not None and best.is_free:
                return request, best
        return None

    def _candidates(
        self, prompts: WaitingPrompts, first: Request, others: int, now: float
    ) -> Iterator[tuple[Request, Ahead]]:
        """Yield requests to compare with the endpoints, with what waits before them, in the order of their turns."""
        if first.passed_over >= MAX_PASSED_OVER:
            yield first, NOTHING_AHEAD
        prompts.forget_lost(self._index.table.pools[first.queue].losses, now)
        behind = Ahead(prompts.seconds, others)
        for _ in range(MAX_DECIDED):
            request = prompts.next_to_decide()
            if request is None or request.awaited is not None:
                break
            if self._decide(request, prompts, behind, now) is None:
                return
        free, seen = self._index.taking_prompts(first.queue, now), set[int]()
        while (request := prompts.first_for(free)) is not None and request.key not in seen:
            assert request.awaited is not None, "it waits for a free endpoint"
            seen.add(request.key)
            yield request, Ahead(prompts.seconds, others, request.awaited.endpoint.key)
        for _ in range(MAX_DECIDED_AGAIN):
            request = prompts.next_to_decide()
            if request is None or request.key in seen:
                return
            seen.add(request.key)
            yield request, behind

    def _decide(self, request: Request, prompts: WaitingPrompts, ahead: Ahead, now: float) -> BestEndpoint | None:
        """Return the best endpoint of a waiting request, which waits for it."""
        prompts.release(request, now)
        best = self._index.best(request.queue, self._estimator.pick(request), now, ahead)
        if best is not None:
            prompts.bind(request, best, now)
        return best
