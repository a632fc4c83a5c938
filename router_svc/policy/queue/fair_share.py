"""What each tenant has been served, by its weight: whose turn it is next.

One account per tenant over the whole router. It is charged an estimate when a request is placed, and what that was
wrong by is settled with the next charges, so that accounts only ever rise and heaps by them can be put right lazily.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

MIN_COST = 1.0
"""Tokens that any request costs, so that turns go round also where nobody knows what requests cost."""
COST_WEIGHT = 0.1
"""Share of the newest request in a tenant's mean cost."""
_SPARE_ENTRIES = 64


@dataclass(slots=True)
class Account:
    """Of one tenant; only the book changes it."""

    weight: float
    served: float = 0.0
    """Tokens divided by the weight."""
    credit: float = 0.0
    """Charged too much so far (negative: too little); in the same unit."""
    mean_cost: float = MIN_COST
    """Of its requests, by its weight."""
    was_charged: bool = False
    live: int = 0
    """Requests that wait or run."""


class _Lowest:
    """The lowest account of the active tenants; a heap that is put right when somebody looks.

    An account that rose need not be noted: what the heap has is then too low, and comes up.
    """

    def __init__(self, figure: Callable[[str], float | None]) -> None:
        self._figure = figure
        self._heap: list[tuple[float, str]] = []

    def note(self, tenant: str, active: int) -> None:
        """It has become active."""
        figure = self._figure(tenant)
        if figure is None:
            return
        heapq.heappush(self._heap, (figure, tenant))
        if len(self._heap) > 2 * active + _SPARE_ENTRIES:
            current = {name: known for _, name in self._heap if (known := self._figure(name)) is not None}
            self._heap = [(known, name) for name, known in current.items()]
            heapq.heapify(self._heap)

    def lowest(self) -> float | None:
        """None: nobody is active."""
        heap = self._heap
        while heap:
            figure, tenant = heap[0]
            current = self._figure(tenant)
            if current == figure:
                return figure
            if current is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (current, tenant))
        return None


class FairShare:
    """The accounts. A tenant is active while one of its requests waits or runs."""

    def __init__(self, weight_of: Callable[[str], float], *, max_lag: float, max_remembered: int) -> None:
        self._weight_of = weight_of
        self._max_lag = max_lag
        self._max_remembered = max_remembered
        self.active: dict[str, Account] = {}
        """Of tenants that have requests, by name; not brought up to the largest lag. Only to be read."""
        self._idle: OrderedDict[str, Account] = OrderedDict()
        self._lowest = _Lowest(self._served)
        self._ceiling = 0.0
        """No active account is above it; at most one that has left is at it."""
        self._ceiling_is_exact = True

    def enter(self, tenant: str) -> None:
        """A request of this tenant came. One that had none begins no lower than the lowest of those that have some."""
        account = self.active.get(tenant)
        if account is not None:
            account.live += 1
            return
        floor = self._lowest.lowest()
        account = self._idle.pop(tenant, None) or Account(weight=self._weight_of(tenant))
        if account.credit < 0.0:
            # Whoever leaves between its requests pays for them all the same.
            account.served, account.credit = account.served - account.credit, 0.0
        if floor is not None and account.served - account.credit < floor:
            account.served = max(account.served, floor)
            account.credit = account.served - floor
        account.live = 1
        self.active[tenant] = account
        self._lowest.note(tenant, len(self.active))
        self._ceiling = max(self._ceiling, account.served)

    def leave(self, tenant: str) -> None:
        """A request of this tenant is over."""
        account = self.active[tenant]
        account.live -= 1
        if account.live:
            return
        del self.active[tenant]
        self._ceiling_is_exact = self._ceiling_is_exact and account.served < self._ceiling
        self._idle[tenant] = account
        if len(self._idle) > self._max_remembered:
            self._idle.popitem(last=False)

    def charge(self, tenant: str, tokens: float) -> float:
        """A request of this tenant is placed and costs about so many tokens; returns what `correct` takes back."""
        account = self.active[tenant]
        charged = max(MIN_COST, tokens)
        cost = charged / account.weight
        used = min(cost, account.credit)
        account.credit -= used
        account.served = self.account(tenant) + (cost - used)
        account.mean_cost += (COST_WEIGHT if account.was_charged else 1.0) * (cost - account.mean_cost)
        account.was_charged = True
        self._ceiling = max(self._ceiling, account.served)
        return charged

    def correct(self, tenant: str, charged: float, tokens: float) -> None:
        """It was charged so much, and cost this; 0 for one that was never served."""
        account = self.active[tenant]
        account.credit += (charged - tokens) / account.weight

    def account(self, tenant: str) -> float:
        """What this active tenant was served, in tokens by weight, brought up to the largest lag there may be."""
        account = self.active[tenant]
        if account.served < self._ceiling - self._max_lag:
            if not self._ceiling_is_exact:
                self._ceiling = max(active.served for active in self.active.values())
                self._ceiling_is_exact = True
            account.served = max(account.served, self._ceiling - self._max_lag)
        return account.served

    def weight(self, tenant: str) -> float:
        """The share of this active tenant."""
        return self.active[tenant].weight

    def _served(self, tenant: str) -> float | None:
        account = self.active.get(tenant)
        return None if account is None else account.served
