"""The order of waiting: by priority, then by arrival."""

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from weft.kernel.request import Operation, Priority


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request as the scheduler sees it. Times are seconds on the router's monotonic clock."""

    key: int
    """The scheduler's own number for it; callers may reuse their request ids."""
    target: str
    """A model or a pool, by name."""
    operation: Operation
    priority: Priority = Priority.NORMAL
    allow_remote: bool = False
    arrived_at: float
    """When it first arrived anywhere, so that being placed again costs no place in the queue."""
    deadline_at: float | None = None
    attempts_used: int = 0
    """Attempts granted before it was placed here; the numbers go on from there."""

    @property
    def order(self) -> tuple[int, float, int]:
        """Who goes first: the lower one."""
        return (self.priority.value, self.arrived_at, self.key)


@dataclass(slots=True)
class WaitingQueue:
    """Requests in the order in which they should be served."""

    _waiting: list[Arrival] = field(default_factory=list)

    def add(self, arrival: Arrival) -> None:
        """Put a request where it belongs, which is not the end for one that waited before."""
        bisect.insort(self._waiting, arrival, key=lambda waiting: waiting.order)

    def remove(self, arrival: Arrival) -> None:
        """Take a request out; it must be waiting."""
        index = bisect.bisect_left(self._waiting, arrival.order, key=lambda waiting: waiting.order)
        assert self._waiting[index].key == arrival.key, "only a waiting request can be removed"
        del self._waiting[index]

    def __iter__(self) -> Iterator[Arrival]:
        return iter(tuple(self._waiting))

    def __len__(self) -> int:
        return len(self._waiting)

    def count_where(self, wanted: Callable[[Arrival], bool]) -> int:
        """How many of a kind wait."""
        return sum(wanted(waiting) for waiting in self._waiting)
