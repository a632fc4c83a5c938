"""The waiting prompts of a tenant, by the endpoint with the earliest first token for each."""

from collections import OrderedDict
from collections.abc import Iterable
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from router_svc.policy.endpoints.load_balancer import BestEndpoint
from router_svc.policy.endpoints.pool import Endpoint
from router_svc.policy.router_request import Request

if TYPE_CHECKING:
    from router_svc.policy.endpoints.candidates import EngineKey

WAIT_SHARE = 0.5
"""Seconds of prefill that a second of waiting outweighs in the order of prompts, so that long ones get their turn."""
USUAL_DEADLINE_SECONDS = 600.0
"""Time until the deadline of most requests: the gateway's default."""

_SPARE_ENTRIES = 64


class WaitingPrompts:
    """One tenant's waiting requests in a priority class of a request class."""

    __slots__ = ("_by_endpoint", "_losses", "requests", "seconds")

    def __init__(self) -> None:
        self.requests: OrderedDict[int, Request] = OrderedDict()
        """By key; those that were decided longest ago first."""
        self.seconds: dict[EngineKey, float] = {}
        """Their prefill on the engines that they wait for."""
        self._by_endpoint: dict[Endpoint, list[tuple[float, int]]] = {}
        """Heaps by rank, with lazy deletion."""
        self._losses = 0

    def add(self, request: Request) -> None:
        """Add a request, which is decided next."""
        self.requests[request.key] = request
        self.requests.move_to_end(request.key, last=False)

    def remove(self, request: Request, now: float) -> None:
        """Remove a request."""
        del self.requests[request.key]
        self.release(request, now)

    def bind(self, request: Request, best: BestEndpoint, now: float) -> None:
        """Let a request wait for an endpoint, which may be free."""
        endpoint, seconds = best.endpoint, best.expected.own_seconds
        engine = endpoint.engine_slots
        engine.line.wait(seconds, now)
        self.seconds[engine.key] = self.seconds.get(engine.key, 0.0) + seconds
        request.awaited = best.without_others()
        heap = self._by_endpoint.setdefault(endpoint, [])
        heappush(heap, (rank_of(request), request.key))
        if len(heap) > 2 * len(self.requests) + _SPARE_ENTRIES:
            heap[:] = sorted(self._valid_entries(endpoint))
        self.requests.move_to_end(request.key)

    def release(self, request: Request, now: float) -> None:
        """Let a request wait for no endpoint."""
        best, request.awaited = request.awaited, None
        if best is not None:
            engine, seconds = best.endpoint.engine_slots, best.expected.own_seconds
            engine.line.wait(-seconds, now)
            # Rounding may leave a little less than nothing.
            self.seconds[engine.key] = max(0.0, self.seconds.get(engine.key, 0.0) - seconds)

    def forget_lost(self, losses: int, now: float) -> None:
        """Let the requests be decided next that wait for endpoints which take none any more.

        `losses`: see `Pool.losses`.
        """
        if losses == self._losses:
            return
        self._losses = losses
        for endpoint in [each for each in self._by_endpoint if not each.may_be_awaited]:
            for _, key in self._valid_entries(endpoint):
                self.release(self.requests[key], now)
                self.requests.move_to_end(key, last=False)
            del self._by_endpoint[endpoint]

    def first_token_seconds(self, request: Request, now: float) -> float:
        """Return the time to the first token of a request that waits for an endpoint, by its place in the order."""
        best = request.awaited
        assert best is not None, "it waits for an endpoint"
        rank, own = rank_of(request), best.expected.seconds - best.expected.line_seconds
        ahead = (self.requests[key].awaited for each, key in self._valid_entries(best.endpoint) if each < rank)
        return (
            best.endpoint.engine_slots.line.seconds(now)
            + own
            + sum(each.expected.own_seconds for each in ahead if each is not None)
        )

    def next_to_decide(self) -> Request | None:
        """Return the newest request that waits for no endpoint, else the one that was decided longest ago."""
        return next(iter(self.requests.values()), None)

    def first_for(self, endpoints: Iterable[Endpoint]) -> Request | None:
        """Return the first of the requests that wait for one of these endpoints."""
        best: tuple[float, int] | None = None
        for endpoint in endpoints:
            heap = self._by_endpoint.get(endpoint)
            while heap and not self._is_valid(heap[0], endpoint):
                heappop(heap)
            if heap and (best is None or heap[0] < best):
                best = heap[0]
        return None if best is None else self.requests[best[1]]

    def _valid_entries(self, endpoint: Endpoint) -> set[tuple[float, int]]:
        return {entry for entry in self._by_endpoint[endpoint] if self._is_valid(entry, endpoint)}

    def _is_valid(self, entry: tuple[float, int], endpoint: Endpoint) -> bool:
        rank, key = entry
        request = self.requests.get(key)
        awaited = None if request is None else request.awaited
        return awaited is not None and awaited.endpoint is endpoint and rank_of(self.requests[key]) == rank


def rank_of(request: Request) -> float:
    """Return the order of a request among those of its tenant: the shortest prefill first, less a share of its wait.

    A request with an earlier deadline counts as one that arrived earlier.
    """
    assert request.awaited is not None, "only a request that waits for an endpoint has a rank"
    deadline_at, arrived_at, _ = request.queue_key
    return request.awaited.expected.own_seconds + WAIT_SHARE * min(arrived_at, deadline_at - USUAL_DEADLINE_SECONDS)
