"""Live requests, and the request classes in which they wait."""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from router_svc.policy.arrival import Arrival, Needs
from router_svc.policy.decisions import Loads, Rejects, Waits
from router_svc.policy.endpoints.candidates import Candidate, CandidateKey
from router_svc.policy.endpoints.first_token import FirstToken
from router_svc.policy.queue.fair_queue import FairQueue, QueuePosition, TenantHead, queue_position
from weft.kernel.request import Priority
from weft.kernel.value import value_class

PRIORITIES = tuple(Priority)
_SPARE_ENTRIES = 64


@value_class()
class RequestKind:
    """Properties that make requests of a queue interchangeable."""

    needs: Needs
    excluded: frozenset[CandidateKey] = frozenset()
    """Candidates on which an attempt failed."""
    failed_wakes: frozenset[str] = frozenset()
    """Models whose wake failed while the request waited for it; it does not wake them again."""
    durable: bool = False
    """Whether the requests are durable: they wait in classes of their own, so that figures for callers exclude them."""
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Kinds are looked up several times per request, and all fields would be hashed each time.
        object.__setattr__(self, "_hash", hash((self.needs, self.excluded, self.failed_wakes, self.durable)))

    def __hash__(self) -> int:
        return self._hash

    def without(self, candidate: CandidateKey) -> "RequestKind":
        """Return the kind after a failed attempt on a candidate."""
        return replace(self, excluded=self.excluded | {candidate})

    def not_waking(self, model: str) -> "RequestKind":
        """Return the kind after a failed wake of a model."""
        return replace(self, failed_wakes=self.failed_wakes | {model})


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request that waits or runs."""

    key: int
    """The scheduler's number for it."""
    arrival: Arrival
    place: QueuePosition
    deadline_at: float | None
    """The request's own or its route's deadline, whichever is earlier."""
    attempt: int
    kind: RequestKind
    queue: str
    cost: float = 0.0
    """Estimated charge in tokens."""
    expected_work: float = 0.0
    """Expected work in its unit as of its arrival; see `Estimates.expected_work`."""
    keep_alive_seconds: float | None = None
    """As its route sets it."""
    charged: float = 0.0
    """Tokens that its tenant was charged for the running attempt."""
    queued_since: float = 0.0
    """Start of the queue timeout, while it waits."""
    waited_seconds: float = 0.0
    """Time it has waited so far, while it does not wait."""
    in_queue_since: float = 0.0
    """When it last began to wait ..."""
    in_queue_seconds: float = 0.0
    """... and how long it had waited before, loads included."""
    passed_over: int = 0
    """Later requests of its tenant that were placed before it, for their cached prompts."""
    bounces: int = 0
    failures: int = 0
    """Attempts that broke and wakes that failed."""
    is_retry: bool = False
    """Whether one of its attempts broke."""
    placed_on: Candidate | None = None
    holds_slot: bool = True
    """While it is placed: whether it occupies a slot. False: it runs beside the slots."""
    placed_at: float = 0.0
    expected: FirstToken | None = None
    """While it is placed: its time to the first token as it was expected; None: its endpoint was chosen otherwise."""
    content_at: float | None = None
    waits_in: "RequestClass | None" = None
    last_failure: Rejects | None = None
    """The refusal it gets when no attempt is left."""
    last_status: Waits | Loads | None = None
    status_at: float = 0.0
    has_status: bool = False

    @property
    def uncached_tokens(self) -> int:
        """Return the prompt tokens that its endpoint has to process before its first token."""
        return self.arrival.prompt_tokens if self.expected is None else self.expected.uncached_tokens


@dataclass(slots=True, eq=False)
class RequestClass:
    """Requests of one queue that can stand in for each other."""

    queue: str
    kind: RequestKind
    account_of: Callable[[str], float]
    may_run: Callable[[str], bool]
    priorities: list[FairQueue | None] = field(default_factory=lambda: [None] * len(PRIORITIES))
    waiting: int = 0
    queued_tokens: float = 0.0
    expected_work: float = 0.0
    """Expected work of all waiting requests, which have one operation."""
    arrived_sum: float = 0.0
    """Sum of the arrival times of all waiting requests."""
    counted_from: float = float("-inf")
    """Queue timeouts count from no earlier than this: the end of the last load that the class waited for."""
    is_paused: bool = False
    """Whether the class waits for a load."""
    cold_since: float | None = None
    """When it began to wait for a load, if none has succeeded since; failed loads do not reset it."""
    awaited_wake: str | None = None
    """The model whose wake the class waits for."""
    awaited_began_at: float = float("inf")
    """When the last awaited wake began; infinite: none was."""
    _arrivals: list[tuple[float, int]] = field(default_factory=list)
    _keys: set[int] = field(default_factory=set)

    def add(self, request: LiveRequest) -> None:
        """Add a waiting request."""
        arrival = request.arrival
        fair_queue = self.priorities[arrival.priority]
        if fair_queue is None:
            fair_queue = self.priorities[arrival.priority] = FairQueue(arrival.priority, self.account_of, self.may_run)
        fair_queue.add(arrival.tenant, request.place)
        request.waits_in = self
        self.waiting += 1
        self.queued_tokens += request.cost
        self.expected_work += request.expected_work
        self.arrived_sum += arrival.arrived_at
        self._keys.add(arrival.key)
        heapq.heappush(self._arrivals, (arrival.arrived_at, arrival.key))
        if len(self._arrivals) > 2 * self.waiting + _SPARE_ENTRIES:
            self._arrivals = [entry for entry in self._arrivals if entry[1] in self._keys]
            heapq.heapify(self._arrivals)

    def remove(self, request: LiveRequest) -> None:
        """Remove a waiting request."""
        arrival = request.arrival
        fair_queue = self.priorities[arrival.priority]
        assert fair_queue is not None, "only who waits can be taken out"
        fair_queue.remove(arrival.tenant, request.place)
        request.waits_in = None
        self.waiting -= 1
        self.queued_tokens -= request.cost
        self.expected_work -= request.expected_work
        self.arrived_sum -= arrival.arrived_at
        self._keys.discard(arrival.key)
        if not self.waiting:
            self.queued_tokens = self.expected_work = self.arrived_sum = 0.0
            self._arrivals.clear()

    def head(self) -> tuple[Priority, TenantHead] | None:
        """Return the next request of the highest priority class that has one; None: there is none."""
        for fair_queue in self.priorities:
            if fair_queue is not None and fair_queue.waiting and (head := fair_queue.head()) is not None:
                return fair_queue.priority, head
        return None

    def head_in(self, priority: Priority) -> TenantHead | None:
        """Return the next request of a priority class; None: there is none."""
        fair_queue = self.priorities[priority]
        return fair_queue.head() if fair_queue is not None and fair_queue.waiting else None

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
        """Whether the queue timeout is paused. A wake under way has a time limit of its own."""
        return self.is_paused and (self.awaited_wake is not None or self.may_pause(now, longest_seconds))


def live_request(
    arrival: Arrival,
    queue: str,
    kind: RequestKind,
    *,
    deadline_at: float | None,
    cost: float,
    keep_alive_seconds: float | None,
    now: float,
) -> LiveRequest:
    """Create the live request of a new arrival."""
    return LiveRequest(
        key=arrival.key,
        arrival=arrival,
        place=queue_position(arrival.key, arrival.arrived_at, deadline_at),
        deadline_at=deadline_at,
        attempt=arrival.attempts_used,
        waited_seconds=max(0.0, now - arrival.arrived_at),
        in_queue_seconds=max(0.0, now - arrival.arrived_at),
        kind=kind,
        queue=queue,
        cost=cost,
        keep_alive_seconds=keep_alive_seconds,
    )
