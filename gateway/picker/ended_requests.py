"""The requests of the lane that have ended, each for as long as its second witness is waited for."""

from collections import OrderedDict

from gateway.picker.lane_request import LaneRequest


class EndedRequests:
    """Ended requests by id. Those that are kept for the same time are in one queue: none holds back another one."""

    def __init__(self, max_queue: int) -> None:
        """`max_queue`: of more that are kept for the same time the oldest one is forgotten early."""
        self._max_queue = max_queue
        self._queues: dict[float, OrderedDict[str, tuple[float, LaneRequest]]] = {}
        """By the seconds for which they are kept, the oldest first, each with the time at which it is forgotten. A
        plain dict goes over all that it has forgotten to find its oldest one."""

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __contains__(self, request_id: str) -> bool:
        return any(request_id in queue for queue in self._queues.values())

    def get(self, request_id: str) -> LaneRequest | None:
        """Returns a request; None: it is not known any more, or has not ended."""
        for queue in self._queues.values():
            if request_id in queue:
                return queue[request_id][1]
        return None

    def keep(self, lane: LaneRequest, now: float, seconds: float) -> None:
        """Keep a request that ends now."""
        queue = self._queues.setdefault(seconds, OrderedDict())
        queue[lane.request_id] = (now + seconds, lane)
        if len(queue) > self._max_queue:
            queue.popitem(last=False)

    def forget(self, now: float) -> None:
        """Forget the requests whose time is over. The cost grows with their number, not with that of all."""
        for queue in self._queues.values():
            while queue and next(iter(queue.values()))[0] <= now:
                queue.popitem(last=False)
