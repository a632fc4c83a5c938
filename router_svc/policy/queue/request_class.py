"""Request classes: interchangeable requests of a queue."""

import heapq
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from router_svc.policy.queue.fair_queue import FairQueue, TenantHead
from router_svc.policy.queue.waiting_prompts import WaitingPrompts
from router_svc.policy.router_request import QueuePosition, Request, RequestKind
from weft.kernel.requests.request_values import CALLER_CLASSES, Priority

PRIORITIES = tuple(Priority)
BANDS: Sequence[Sequence[Priority]] = ((Priority.SYSTEM,), CALLER_CLASSES, (Priority.DURABLE,))
"""What is served in this order: the mesh's own work, callers, durable tasks. Only within a tenant do classes of callers
order requests."""
BAND_OF = tuple(band for band, priorities in enumerate(BANDS) for _ in priorities)
"""The band of each priority class."""
FirstRequest = tuple[Priority, TenantHead]
Skipped = Collection[tuple[Priority, str]]
"""Priority classes of tenants whose requests all wait for endpoints that take none now."""
Rank = tuple[int, float, int, float, QueuePosition]
"""Band, the tenant's account and turn, class, position: the lower one is served first. Below 0: overdue."""
_SPARE_ENTRIES = 64


@dataclass(slots=True, eq=False)
class RequestClass:
    """Interchangeable requests of a queue."""

    queue: str
    kind: RequestKind
    standing_of: Callable[[str], tuple[float, int]]
    may_run: Callable[[str], bool]
    priorities: list[FairQueue | None] = field(default_factory=lambda: [None] * len(PRIORITIES))
    prompts: dict[tuple[Priority, str], WaitingPrompts] = field(default_factory=dict)
    """The waiting requests by priority class and tenant."""
    waiting: int = 0
    queued_tokens: float = 0.0
    expected_work: float = 0.0
    """Expected work of all waiting requests, which share one operation."""
    arrived_sum: float = 0.0
    """Sum of the arrival times of all waiting requests."""
    counted_from: float = float("-inf")
    """Earliest start of queue timeouts: the end of the last load that the class waited for."""
    is_paused: bool = False
    """Whether the class waits for a load."""
    cold_since: float | None = None
    """When it began to wait for a load, if none has succeeded since; failed loads do not reset it."""
    awaited_wake: str | None = None
    """The model whose wake the class waits for."""
    awaited_began_at: float = float("inf")
    """When the last awaited wake began; infinity: none did."""
    _arrivals: list[tuple[float, int]] = field(default_factory=list)
    _keys: set[int] = field(default_factory=set)

    def add(self, request: Request) -> None:
        """Add a waiting request."""
        fair_queue = self.priorities[request.spec.priority]
        if fair_queue is None:
            fair_queue = self.priorities[request.spec.priority] = FairQueue(self.standing_of, self.may_run)
        fair_queue.add(request.spec.tenant, request.queue_key)
        whose = request.spec.priority, request.spec.tenant
        if whose not in self.prompts:
            self.prompts[whose] = WaitingPrompts()
        self.prompts[whose].add(request)
        request.waits = True
        self.waiting += 1
        self.queued_tokens += request.cost
        self.expected_work += request.expected_work
        self.arrived_sum += request.arrived_at
        self._keys.add(request.key)
        heapq.heappush(self._arrivals, (request.arrived_at, request.key))
        if len(self._arrivals) > 2 * self.waiting + _SPARE_ENTRIES:
            self._arrivals = [entry for entry in self._arrivals if entry[1] in self._keys]
            heapq.heapify(self._arrivals)

    def remove(self, request: Request, now: float) -> None:
        """Remove a waiting request."""
        whose = request.spec.priority, request.spec.tenant
        self.prompts[whose].remove(request, now)
        if not self.prompts[whose].requests:
            del self.prompts[whose]
        fair_queue = self.priorities[request.spec.priority]
        assert fair_queue is not None, "only who waits can be taken out"
        fair_queue.remove(request.spec.tenant, request.queue_key)
        request.waits = False
        self.waiting -= 1
        self.queued_tokens -= request.cost
        self.expected_work -= request.expected_work
        self.arrived_sum -= request.arrived_at
        self._keys.discard(request.key)
        if not self.waiting:
            self.queued_tokens = self.expected_work = self.arrived_sum = 0.0
            self._arrivals.clear()

    def head(self, skipped: Skipped = ()) -> FirstRequest | None:
        """Return the next request of the first band with one; None: there is none."""
        for priorities in BANDS:
            if (first := self.head_in(priorities, skipped)) is not None:
                return first
        return None

    def head_in(self, priorities: Sequence[Priority], skipped: Skipped = ()) -> FirstRequest | None:
        """Return the next request of a band: of the tenant in turn, the first of its highest class; None: none."""
        first: FirstRequest | None = None
        for priority in priorities:
            fair_queue = self.priorities[priority]
            if fair_queue is None or not fair_queue.waiting:
                continue
            tenants = [tenant for each, tenant in skipped if each is priority] if skipped else ()
            if (head := fair_queue.head(tenants)) is not None:
                # A tenant has the same account and turn in all its classes.
                first = (priority, head) if first is None or head[:2] < first[1][:2] else first
        return first

    def first_of(self, tenant: str, priority: Priority) -> QueuePosition | None:
        """Return the tenant's first request of a priority class; None: it has none."""
        fair_queue = self.priorities[priority]
        return None if fair_queue is None else fair_queue.queue_position(tenant, 0)

    def oldest_arrived_at(self) -> float:
        """Return the arrival of the oldest waiting request; there must be one."""
        while self._arrivals[0][1] not in self._keys:
            heapq.heappop(self._arrivals)
        return self._arrivals[0][0]

    def earliest_deadline(self) -> float | None:
        """Return the earliest deadline of all waiting requests; None: none has one."""
        earliest = min((fair_queue.earliest_deadline() for fair_queue in self.fair_queues()), default=float("inf"))
        return None if earliest == float("inf") else earliest

    def request_keys(self) -> list[int]:
        """Return the keys of all waiting requests, by priority class."""
        return [key for fair_queue in self.fair_queues() for key in fair_queue.request_keys()]

    def fair_queues(self) -> Iterator[FairQueue]:
        """Yield the priority classes with waiting requests."""
        return (fair_queue for fair_queue in self.priorities if fair_queue is not None and fair_queue.waiting)

    def begin_pause(self, now: float) -> None:
        """Pause the queue timeout while the class waits for a load."""
        self.is_paused = True
        if self.cold_since is None:
            self.cold_since = now

    def end_pause(self, *, for_good: bool) -> None:
        """End the pause of the queue timeout; `for_good`: because a load has succeeded."""
        self.is_paused, self.awaited_wake = False, None
        if for_good:
            self.cold_since = None

    def may_pause(self, now: float, longest_seconds: float) -> bool:
        """Whether the queue timeout may be paused: for at most this long in all until a load succeeds."""
        return self.cold_since is None or now < self.cold_since + longest_seconds

    def stands_still(self, now: float, longest_seconds: float) -> bool:
        """Whether the queue timeout is paused. A wake under way has its own time limit."""
        return self.is_paused and (self.awaited_wake is not None or self.may_pause(now, longest_seconds))


def rank_of(first: FirstRequest) -> Rank:
    """Return the sort key of the next requests of request classes."""
    priority, head = first
    return BAND_OF[priority], head.account, head.turn, priority, head.queue_key
