"""The order of waiting within one band of one class: tenants by their accounts, and within a tenant by deadline.

A class is a set of requests of one line that can stand in for each other: equal needs, tried in vain in the same
places.
"""

import bisect
import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.kernel.request import Priority

QueuePosition = tuple[float, float, int]
"""Deadline or infinity, arrival, key: who of a tenant goes first is the lower one."""

_Entry = tuple[float, QueuePosition, str]
"""Account, first request, tenant."""

_SPARE_ENTRIES = 64
_SPARE_HEAD = 64


@dataclass(slots=True)
class SortedPositions:
    """Places in order. Taking the first one costs nothing much, however many there are."""

    _places: list[QueuePosition] = field(default_factory=list)
    _gone: int = 0
    """So many at the front are no longer there."""

    def __len__(self) -> int:
        return len(self._places) - self._gone

    @property
    def first(self) -> QueuePosition:
        """Whose turn is next; there must be one."""
        return self._places[self._gone]

    @property
    def last(self) -> QueuePosition:
        """Whose turn comes after all others'; there must be one."""
        return self._places[-1]

    def at(self, index: int) -> QueuePosition | None:
        """The one after so many others; None: there are not so many."""
        index += self._gone
        return self._places[index] if index < len(self._places) else None

    def add(self, place: QueuePosition) -> None:
        """Put it where it belongs, which is the end for most."""
        if len(self) and place > self._places[-1]:
            self._places.append(place)
        else:
            bisect.insort(self._places, place, lo=self._gone)

    def remove(self, place: QueuePosition) -> None:
        """Take it out; it must be there."""
        if self._places[self._gone] != place:
            index = bisect.bisect_left(self._places, place, lo=self._gone)
            assert self._places[index : index + 1] == [place], "only who waits can be taken out"
            del self._places[index]
            return
        self._gone += 1
        if self._gone > _SPARE_HEAD and self._gone * 2 > len(self._places):
            del self._places[: self._gone]
            self._gone = 0

    def ahead_of(self, place: QueuePosition) -> int:
        """How many go before this one, whether it is there or not."""
        if self._places[-1] == place:
            return len(self._places) - self._gone - 1
        return bisect.bisect_left(self._places, place, lo=self._gone) - self._gone

    def request_keys(self) -> list[int]:
        """The keys of all, in order."""
        return [place[2] for place in self._places[self._gone :]]


class TenantHead(NamedTuple):
    """Whose turn it is in a band of a class. A tuple, because one is made for every line that is looked at."""

    account: float
    place: QueuePosition
    tenant: str

    @property
    def key(self) -> int:
        """Of the request."""
        return self.place[2]


@dataclass(slots=True)
class FairQueue:
    """One band of one class. Tenants who may not have more running are set aside until they are listed again."""

    priority: Priority
    account_of: Callable[[str], float]
    may_run: Callable[[str], bool]
    """Whether a tenant may have one more request running."""
    _tenants: dict[str, SortedPositions] = field(default_factory=dict)
    _heap: list[_Entry] = field(default_factory=list)
    """By account and first request, lazily put right: both only ever rise, but for a request that goes before the first
    one, with which its tenant is entered anew.
    """
    _entries: dict[str, _Entry] = field(default_factory=dict)
    """The one in the heap that counts, of each tenant that is not set aside."""
    _aside: set[str] = field(default_factory=set)
    waiting: int = 0

    def add(self, tenant: str, place: QueuePosition) -> None:
        """A request of this tenant waits."""
        places = self._tenants.get(tenant)
        if places is None:
            places = self._tenants[tenant] = SortedPositions()
        places.add(place)
        self.waiting += 1
        if places.first is place and tenant not in self._aside:
            self._enter(tenant, places)

    def remove(self, tenant: str, place: QueuePosition) -> None:
        """This request of this tenant does not wait any more; it must have waited."""
        places = self._tenants[tenant]
        places.remove(place)
        self.waiting -= 1
        if not len(places):
            del self._tenants[tenant]
            self._entries.pop(tenant, None)
            self._aside.discard(tenant)

    def head(self) -> TenantHead | None:
        """Whose turn it is; None: nobody's, or only tenants wait who may not have more running."""
        heap = self._heap
        while heap:
            entry = account, place, tenant = heap[0]
            if self._entries.get(tenant) is not entry:
                heapq.heappop(heap)
                continue
            current, first = self.account_of(tenant), self._tenants[tenant].first
            if current != account or first != place:
                self._entries[tenant] = (current, first, tenant)
                heapq.heapreplace(heap, self._entries[tenant])
            elif self.may_run(tenant):
                return TenantHead(account, place, tenant)
            else:
                heapq.heappop(heap)
                del self._entries[tenant]
                self._aside.add(tenant)
        return None

    def reactivate(self, tenant: str) -> None:
        """It may have more running again."""
        if tenant in self._aside:
            self._aside.discard(tenant)
            self._enter(tenant, self._tenants[tenant])

    def ahead_of(self, tenant: str, place: QueuePosition) -> int:
        """How many of the tenant's own requests go before this one."""
        places = self._tenants.get(tenant)
        return 0 if places is None else places.ahead_of(place)

    def last_of(self, tenant: str) -> QueuePosition | None:
        """The tenant's last request; None: it has none here."""
        places = self._tenants.get(tenant)
        return None if places is None else places.last

    def queue_position(self, tenant: str, index: int) -> QueuePosition | None:
        """The tenant's request that comes after so many of its own; None: it has none here."""
        places = self._tenants.get(tenant)
        return None if places is None else places.at(index)

    def earliest_deadline(self) -> float:
        """The earliest one of all who wait; infinity: none has one."""
        return min((places.first[0] for places in self._tenants.values()), default=math.inf)

    def request_keys(self) -> list[int]:
        """The keys of all who wait, tenant by tenant."""
        return [key for places in self._tenants.values() for key in places.request_keys()]

    def _enter(self, tenant: str, places: SortedPositions) -> None:
        entry = self._entries[tenant] = (self.account_of(tenant), places.first, tenant)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._tenants) + _SPARE_ENTRIES:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)


def queue_position(key: int, arrived_at: float, deadline_at: float | None) -> QueuePosition:
    """Where a request stands among those of its tenant."""
    return (math.inf if deadline_at is None else deadline_at, arrived_at, key)
