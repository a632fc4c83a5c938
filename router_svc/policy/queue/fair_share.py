"""Fair share: each tenant's account holds what it was served divided by its weight; the lowest is served next.

A tenant has one account over the whole router. It is charged an estimate when a request is placed, and the error is
settled with the next charges, so that accounts only rise and heaps of them can be corrected lazily.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

MIN_COST = 1.0
"""Minimum tokens charged per request, so that grants rotate even if costs are unknown."""
COST_WEIGHT = 0.1
"""Weight of the newest request in a tenant's mean cost."""
_SPARE_ENTRIES = 64


@dataclass(slots=True)
class Account:
    """A tenant's account; only `FairShare` changes it."""

    weight: float
    served: float = 0.0
    """Tokens divided by the weight."""
    credit: float = 0.0
    """Total overcharge (negative: undercharge), in the same unit."""
    mean_cost: float = MIN_COST
    """Mean cost of its requests divided by its weight."""
    was_charged: bool = False
    live: int = 0
    """Waiting and running requests."""
    waiting: int = 0
    turn: int = 0
    """Rises when it begins to wait and with each charge: the lower one of two equal accounts is served first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptAccount:
    """An account as stored for a restart of the router. Accounts of different routers are not comparable."""

    tenant: str
    tokens: float
    """Served tokens divided by its weight."""
    mean_cost_tokens: float | None = None
    """Mean cost of its requests in tokens; None: it was never charged."""
    is_active: bool = False
    """Whether it had a waiting or running request."""


def aged(accounts: Iterable[KeptAccount], age_seconds: float, memory_seconds: float) -> Sequence[KeptAccount]:
    """Return accounts of a router that ended `age_seconds` ago: each one's lead over the lowest, reduced by age.

    The leads shrink linearly to 0 after `memory_seconds`. The lowest account is that of an active tenant, as one
    without requests has no claim to be served first. A negative age, after the clock was set back, counts as 0.
    """
    known = list(accounts)
    lowest = min((each.tokens for each in known if each.is_active), default=None)
    if lowest is None:
        lowest = min((each.tokens for each in known), default=0.0)
    left = max(0.0, 1.0 - max(0.0, age_seconds) / memory_seconds)
    return [replace(each, tokens=max(0.0, each.tokens - lowest) * left) for each in known]


class _Lowest:
    """The lowest account of the active tenants: a heap that is corrected when it is read.

    Accounts that rose need not be reported: their heap entries are too low, and so reach the top.
    """

    def __init__(self, figure: Callable[[str], float | None]) -> None:
        self._figure = figure
        self._heap: list[tuple[float, str]] = []

    def note(self, tenant: str, active: int) -> None:
        """Add a tenant that became active."""
        figure = self._figure(tenant)
        if figure is None:
            return
        heapq.heappush(self._heap, (figure, tenant))
        if len(self._heap) > 2 * active + _SPARE_ENTRIES:
            current = {name: known for _, name in self._heap if (known := self._figure(name)) is not None}
            self._heap = [(known, name) for name, known in current.items()]
            heapq.heapify(self._heap)

    def lowest(self) -> float | None:
        """Return the lowest account; None: no tenant is active."""
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
    """The accounts of all tenants. A tenant is active while it has a waiting or running request."""

    def __init__(self, weight_of: Callable[[str], float], *, max_lag: float, max_remembered: int) -> None:
        self._weight_of = weight_of
        self._max_lag = max_lag
        self._max_remembered = max_remembered
        self.active: dict[str, Account] = {}
        """Accounts of active tenants by name, without the correction for the maximum lag. Read-only."""
        self._idle: OrderedDict[str, Account] = OrderedDict()
        self._returning: set[str] = set()
        """Tenants that were active when the router ended and have sent no request since."""
        self._changed: set[str] = set()
        """Tenants with accounts that changed since `take_changed`."""
        self._lowest = _Lowest(self._served)
        self._ceiling = 0.0
        """Upper bound of all active accounts."""
        self._ceiling_is_exact = True
        self._turns = 0

    def enter(self, tenant: str) -> None:
        """Record a new request of a tenant.

        An inactive tenant starts at least at the lowest active account, unless it was active when the router ended and
        its account was restored.
        """
        account = self.active.get(tenant)
        if account is not None:
            account.live += 1
            return
        self._changed.add(tenant)
        if tenant in self._returning:
            # Its requests kept waiting while the router was away.
            self._returning.remove(tenant)
            floor = None
        else:
            floor = self._lowest.lowest() if self.active else None
        account = self._idle.pop(tenant, None) or Account(weight=self._weight_of(tenant))
        if account.credit < 0.0:
            # An undercharge must not be cancelled by leaving between requests.
            account.served, account.credit = account.served - account.credit, 0.0
        if floor is not None and account.served - account.credit < floor:
            account.served = max(account.served, floor)
            account.credit = account.served - floor
        account.live = 1
        self.active[tenant] = account
        self._lowest.note(tenant, len(self.active))
        self._ceiling = max(self._ceiling, account.served)

    def leave(self, tenant: str) -> None:
        """Record that a request of a tenant ended."""
        account = self.active[tenant]
        account.live -= 1
        if account.live:
            return
        self._changed.add(tenant)
        del self.active[tenant]
        self._ceiling_is_exact = self._ceiling_is_exact and account.served < self._ceiling
        self._idle[tenant] = account
        self._forget_idle()

    def begin_wait(self, tenant: str) -> None:
        """Record that a request of an active tenant waits."""
        account = self.active[tenant]
        if not account.waiting:
            self._turns += 1
            account.turn = self._turns
        account.waiting += 1

    def end_wait(self, tenant: str) -> None:
        """Record that a request of a tenant waits no longer."""
        self.active[tenant].waiting -= 1

    def _forget_idle(self) -> None:
        """Forget the tenant that has been inactive longest if too many are stored."""
        if len(self._idle) > self._max_remembered:
            forgotten, _ = self._idle.popitem(last=False)
            self._changed.discard(forgotten)
            self._returning.discard(forgotten)

    def charge(self, tenant: str, tokens: float) -> float:
        """Charge a tenant for a placed request with estimated tokens; returns the charge, for `correct`."""
        account = self.active[tenant]
        self._changed.add(tenant)
        charged = max(MIN_COST, tokens)
        cost = charged / account.weight
        used = min(cost, account.credit)
        account.credit -= used
        account.served = self.account(tenant) + (cost - used)
        account.mean_cost += (COST_WEIGHT if account.was_charged else 1.0) * (cost - account.mean_cost)
        account.was_charged = True
        self._turns += 1
        account.turn = self._turns
        self._ceiling = max(self._ceiling, account.served)
        return charged

    def correct(self, tenant: str, charged: float, tokens: float) -> None:
        """Correct a charge to the tokens that were used; 0 for a request that was not served."""
        account = self.active[tenant]
        self._changed.add(tenant)
        account.credit += (charged - tokens) / account.weight

    def account(self, tenant: str) -> float:
        """Return an active tenant's account in weighted tokens, raised to the maximum lag behind the highest."""
        account = self.active[tenant]
        if account.served < self._ceiling - self._max_lag:
            if not self._ceiling_is_exact:
                self._ceiling = max(active.served for active in self.active.values())
                self._ceiling_is_exact = True
            account.served = max(account.served, self._ceiling - self._max_lag)
        return account.served

    def standing(self, tenant: str) -> tuple[float, int]:
        """Return an active tenant's account and turn: the lowest is served first. Both only rise."""
        return self.account(tenant), self.active[tenant].turn

    def known_account(self, tenant: str) -> float | None:
        """Return the account of a tenant, active or not, without changing it; None: none, or it was forgotten."""
        account = self.active.get(tenant) or self._idle.get(tenant)
        return None if account is None else account.served - account.credit

    def weight(self, tenant: str) -> float:
        """Return the weight of an active tenant."""
        return self.active[tenant].weight

    def reweigh(self, tenant: str) -> float:
        """Apply a tenant's current weight; returns the previous one.

        What it was served keeps the old weight; its mean cost and overcharge are converted.
        """
        account = self.active.get(tenant) or self._idle.get(tenant)
        if account is None:
            return self._weight_of(tenant)
        before, account.weight = account.weight, self._weight_of(tenant)
        account.credit *= before / account.weight
        if account.was_charged:
            account.mean_cost *= before / account.weight
        return before

    def take_changed(self) -> Sequence[KeptAccount]:
        """Return the accounts to store that changed since the last call, without forgotten ones."""
        changed, self._changed = self._changed, set()
        return [found for tenant in sorted(changed) if (found := self._kept(tenant)) is not None]

    def give_back(self, accounts: Iterable[KeptAccount]) -> None:
        """Return these accounts again from the next `take_changed`, as they could not be stored."""
        self._changed.update(each.tenant for each in accounts)

    def restore(self, accounts: Iterable[KeptAccount]) -> None:
        """Restore accounts from before a restart, as returned by `aged`. Call it once, before the first request.

        If there are too many, the lowest are dropped: a tenant without an account starts at 0, as they nearly do.
        """
        highest = sorted(accounts, key=lambda each: (-each.tokens, each.tenant))[: self._max_remembered]
        for kept in reversed(highest):
            account = self._idle[kept.tenant] = Account(weight=self._weight_of(kept.tenant), served=kept.tokens)
            if kept.mean_cost_tokens is not None:
                account.mean_cost, account.was_charged = kept.mean_cost_tokens / account.weight, True
            if kept.is_active:
                self._returning.add(kept.tenant)
            self._changed.add(kept.tenant)

    def end_return(self) -> None:
        """Treat tenants that have sent no request since `restore` like any inactive tenant."""
        self._returning.clear()

    def _kept(self, tenant: str) -> KeptAccount | None:
        account = self.active.get(tenant) or self._idle.get(tenant)
        if account is None:
            return None
        return KeptAccount(
            tenant=tenant,
            tokens=account.served - account.credit,
            mean_cost_tokens=account.mean_cost * account.weight if account.was_charged else None,
            is_active=tenant in self.active or tenant in self._returning,
        )

    def _served(self, tenant: str) -> float | None:
        account = self.active.get(tenant)
        return None if account is None else account.served
