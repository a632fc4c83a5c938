"""The waiting prompts of a tenant, by the endpoint with the earliest first token for each."""

from collections import OrderedDict
from collections.abc import Iterable
from heapq import heappop, heappush

from router_svc.policy.endpoints.candidates import CandidateKey, EngineKey
from router_svc.policy.endpoints.load_balancer import Best
from router_svc.policy.request import Request

WAIT_SHARE = 0.5
"""Seconds of prefill that a second of waiting outweighs in the order of prompts, so that long ones get their turn."""
USUAL_DEADLINE_SECONDS = 600.0
"""Time until the deadline of most requests: the gateway's default."""


class WaitingPrompts:
    """One tenant's waiting requests in a priority class of a request class."""

    __slots__ = ("_by_endpoint", "requests", "seconds")

    def __init__(self) -> None:
        self.requests: OrderedDict[int, Request] = OrderedDict()
        """By key; those that were decided longest ago first."""
        self.seconds: dict[EngineKey, float] = {}
        """Their prefill on the engines that they wait for."""
        self._by_endpoint: dict[CandidateKey, list[tuple[float, int]]] = {}
        """Heaps with lazy deletion."""

    def add(self, request: Request) -> None:
        """Add a request, which is decided next."""
        self.requests[request.key] = request
        self.requests.move_to_end(request.key, last=False)

    def remove(self, request: Request, now: float) -> None:
        """Remove a request."""
        del self.requests[request.key]
        self.release(request, now)

    def bind(self, request: Request, best: Best, now: float) -> None:
        """Let a request wait for an endpoint, which may be free."""
        engine, seconds = best.endpoint.engine_slots, best.expected.own_seconds
        engine.line.wait(seconds, now)
        self.seconds[engine.key] = self.seconds.get(engine.key, 0.0) + seconds
        request.awaited = best
        heappush(self._by_endpoint.setdefault(best.endpoint.key, []), (rank_of(request), request.key))
        self.requests.move_to_end(request.key)

    def release(self, request: Request, now: float) -> None:
        """Let a request wait for no endpoint."""
        best, request.awaited = request.awaited, None
        if best is not None:
            engine, seconds = best.endpoint.engine_slots, best.expected.own_seconds
            engine.line.wait(-seconds, now)
            # Rounding may leave a little less than nothing.
            self.seconds[engine.key] = max(0.0, self.seconds[engine.key] - seconds)

    def next_to_decide(self) -> Request | None:
        """Return the newest request that waits for no endpoint, else the one that was decided longest ago."""
        return next(iter(self.requests.values()), None)

    def first_for(self, keys: Iterable[CandidateKey]) -> Request | None:
        """Return the first of the requests that wait for one of these endpoints."""
        best: tuple[float, int] | None = None
        for key in keys:
            heap = self._by_endpoint.get(key)
            while heap:
                rank, number = heap[0]
                request = self.requests.get(number)
                if (
                    request is not None
                    and request.awaited is not None
                    and request.awaited.endpoint.key == key
                    and rank_of(request) == rank
                ):
                    best = heap[0] if best is None or heap[0] < best else best
                    break
                heappop(heap)
        return None if best is None else self.requests[best[1]]


def rank_of(request: Request) -> float:
    """Return the order of a request among those of its tenant: the shortest prefill first, less a share of its wait.

    A request with an earlier deadline counts as one that arrived earlier.
    """
    assert request.awaited is not None, "only a request that waits for an endpoint has a rank"
    deadline_at, arrived_at, _ = request.place
    return request.awaited.expected.own_seconds + WAIT_SHARE * min(arrived_at, deadline_at - USUAL_DEADLINE_SECONDS)
