"""The order of requests within a priority class of a request class: tenants by account, then requests by deadline."""

import bisect
import heapq
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from router_svc.policy.router_request import QueuePosition

_Entry = tuple[float, int, str]
"""Account, turn, tenant."""

_SPARE_ENTRIES = 64
_SPARE_HEAD = 64


@dataclass(slots=True)
class SortedPositions:
    """Sorted positions. Taking the first one is O(1) on average."""

    _positions: list[QueuePosition] = field(default_factory=list)
    _gone: int = 0
    """Number of removed entries at the front."""

    def __len__(self) -> int:
        return len(self._positions) - self._gone

    @property
    def first(self) -> QueuePosition:
        """The position that is served first; there must be one."""
        return self._positions[self._gone]

    @property
    def last(self) -> QueuePosition:
        """The position that is served last; there must be one."""
        return self._positions[-1]

    def at(self, index: int) -> QueuePosition | None:
        """Return the position at an index; None: out of range."""
        index += self._gone
        return self._positions[index] if index < len(self._positions) else None

    def add(self, queue_key: QueuePosition) -> None:
        """Insert a position, usually at the end."""
        if len(self) and queue_key > self._positions[-1]:
            self._positions.append(queue_key)
        else:
            bisect.insort(self._positions, queue_key, lo=self._gone)

    def remove(self, queue_key: QueuePosition) -> None:
        """Remove a position; it must be present."""
        if self._positions[self._gone] != queue_key:
            index = bisect.bisect_left(self._positions, queue_key, lo=self._gone)
            assert self._positions[index : index + 1] == [queue_key], "only who waits can be taken out"
            del self._positions[index]
            return
        self._gone += 1
        if self._gone > _SPARE_HEAD and self._gone * 2 > len(self._positions):
            del self._positions[: self._gone]
            self._gone = 0

    def ahead_of(self, queue_key: QueuePosition) -> int:
        """Return the number of positions before this one, which need not be present."""
        if self._positions[-1] == queue_key:
            return len(self._positions) - self._gone - 1
        return bisect.bisect_left(self._positions, queue_key, lo=self._gone) - self._gone

    def request_keys(self) -> list[int]:
        """Return the keys of all requests in order."""
        return [queue_key[2] for queue_key in self._positions[self._gone :]]


class TenantHead(NamedTuple):
    """The tenant and request that a fair queue serves next. A tuple, as one is created for every examined queue."""

    account: float
    turn: int
    queue_key: QueuePosition
    tenant: str

    @property
    def key(self) -> int:
        """Key of the request."""
        return self.queue_key[2]


@dataclass(slots=True)
class FairQueue:
    """One priority class of a request class. Tenants at their concurrency cap are set aside until reactivated."""

    standing_of: Callable[[str], tuple[float, int]]
    """See `FairShare.standing`."""
    may_run: Callable[[str], bool]
    """Whether a tenant may have another request running."""
    _tenants: dict[str, SortedPositions] = field(default_factory=dict)
    _heap: list[_Entry] = field(default_factory=list)
    """Heap by account and turn, corrected lazily as both only rise."""
    _entries: dict[str, _Entry] = field(default_factory=dict)
    """The valid heap entry of each tenant that is not set aside."""
    _aside: set[str] = field(default_factory=set)
    waiting: int = 0

    def add(self, tenant: str, queue_key: QueuePosition) -> None:
        """Add a request of a tenant."""
        positions = self._tenants.get(tenant)
        if positions is None:
            positions = self._tenants[tenant] = SortedPositions()
            self._enter(tenant)
        positions.add(queue_key)
        self.waiting += 1

    def remove(self, tenant: str, queue_key: QueuePosition) -> None:
        """Remove a waiting request of a tenant."""
        positions = self._tenants[tenant]
        positions.remove(queue_key)
        self.waiting -= 1
        if not len(positions):
            del self._tenants[tenant]
            self._entries.pop(tenant, None)
            self._aside.discard(tenant)

    def head(self, skipped: Collection[str] = ()) -> TenantHead | None:
        """Return the tenant and request to serve next; None: no waiting tenant is below its cap, or all are skipped."""
        if not skipped:
            return self._head()
        aside: list[_Entry] = []
        while (found := self._head()) is not None and found.tenant in skipped:
            aside.append(heapq.heappop(self._heap))
        for entry in aside:
            heapq.heappush(self._heap, entry)
        return found

    def _head(self) -> TenantHead | None:
        heap = self._heap
        while heap:
            entry = account, turn, tenant = heap[0]
            if self._entries.get(tenant) is not entry:
                heapq.heappop(heap)
                continue
            current = self.standing_of(tenant)
            if current != (account, turn):
                self._entries[tenant] = (*current, tenant)
                heapq.heapreplace(heap, self._entries[tenant])
            elif self.may_run(tenant):
                return TenantHead(account, turn, self._tenants[tenant].first, tenant)
            else:
                heapq.heappop(heap)
                del self._entries[tenant]
                self._aside.add(tenant)
        return None

    def reactivate(self, tenant: str) -> None:
        """Reactivate a tenant that left its cap."""
        if tenant in self._aside:
            self._aside.discard(tenant)
            self._enter(tenant)

    def ahead_of(self, tenant: str, queue_key: QueuePosition) -> int:
        """Return the number of the tenant's requests before this one."""
        positions = self._tenants.get(tenant)
        return 0 if positions is None else positions.ahead_of(queue_key)

    def last_of(self, tenant: str) -> QueuePosition | None:
        """Return the tenant's last request; None: it has none."""
        positions = self._tenants.get(tenant)
        return None if positions is None else positions.last

    def queue_position(self, tenant: str, index: int) -> QueuePosition | None:
        """Return the tenant's request at an index; None: it has none."""
        positions = self._tenants.get(tenant)
        return None if positions is None else positions.at(index)

    def earliest_deadline(self) -> float:
        """Return the earliest deadline of all requests; infinity: none has one."""
        return min((positions.first[0] for positions in self._tenants.values()), default=math.inf)

    def request_keys(self) -> list[int]:
        """Return the keys of all requests, tenant by tenant."""
        return [key for positions in self._tenants.values() for key in positions.request_keys()]

    def _enter(self, tenant: str) -> None:
        entry = self._entries[tenant] = (*self.standing_of(tenant), tenant)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._tenants) + _SPARE_ENTRIES:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)
