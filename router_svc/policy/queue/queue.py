"""The queue of one target: a pool, or a route."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil, inf
from typing import TYPE_CHECKING, NamedTuple

from router_svc.policy.endpoints.candidates import Needs
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.queue.fair_queue import TenantHead
from router_svc.policy.queue.fair_share import MIN_COST, Account, FairShare
from router_svc.policy.queue.request_class import PRIORITIES, RequestClass
from router_svc.policy.request import Request, RequestKind
from weft.kernel.request import Priority

if TYPE_CHECKING:
    from router_svc.policy.endpoints.capacity import Capacity
    from router_svc.policy.endpoints.choice import Considered

PACE_WINDOW_SECONDS = 60.0
"""Window over which a pool's throughput is averaged."""
AVERAGE_WEIGHT = 0.1
"""Weight of the newest wait in the average."""
MIN_STEADY_GRANTS = 8.0
"""Discounted grants of a backlogged queue below which their rate is not significant."""


class GrantRate:
    """Grants per second of a queue while it is backlogged, and the average wait of granted requests."""

    def __init__(self, window_seconds: float) -> None:
        self._window = window_seconds
        self._count = 0.0
        self._counted_at = 0.0
        self._backlogged_since: float | None = None
        self.average_wait_seconds: float | None = None

    def note_backlog(self, now: float, *, waiting: bool) -> None:
        """Record whether requests wait in the queue."""
        if not waiting:
            self._backlogged_since = None
        elif self._backlogged_since is None:
            self._backlogged_since = self._counted_at = now
            self._count = 0.0

    def note_grant(self, waited_seconds: float, now: float) -> None:
        """Record a grant to a request that waited this long; 0: it did not wait."""
        average = self.average_wait_seconds
        self.average_wait_seconds = (
            waited_seconds if average is None else average + AVERAGE_WEIGHT * (waited_seconds - average)
        )
        if self._backlogged_since is not None:
            self._count = self._decayed(now) + 1.0
            self._counted_at = now

    def backlogged_seconds(self, now: float) -> float:
        """Return how long requests have waited without a break."""
        return 0.0 if self._backlogged_since is None else now - self._backlogged_since

    def grants_per_second(self, now: float) -> float | None:
        """Return the grants per second; None: no request waits, or no grant since the backlog began."""
        since = self._backlogged_since
        if since is None or not self._count or now <= since:
            return None
        seen = self._window * -math.expm1((since - now) / self._window)
        return self._decayed(now) / seen

    def is_steady(self, now: float) -> bool:
        """Whether the backlog has had enough grants for their rate to be significant."""
        return self._backlogged_since is not None and self._decayed(now) >= MIN_STEADY_GRANTS

    def _decayed(self, now: float) -> float:
        return self._count * math.exp((self._counted_at - now) / self._window)


MAX_TENANTS_COMPARED = 64
"""Tenants that a position considers individually; the others count as their average."""

MAX_TENANTS_WITH_TIES = 4
"""Maximum number of waiting tenants for which equal accounts are ordered by arrival."""
MAX_REMEMBERED_KINDS = 1_024
"""Maximum request kinds that a queue caches, as callers choose names of tools freely."""
Rank = tuple[int, float, tuple[float, float, int]]
"""Priority class, account, position: the lower one is served first. Class -1: a class that is overdue."""
_DURABLE = Priority.DURABLE
_MOST_SAVED_GRANTS = 1.0
"""Maximum grants that durable requests carry over in addition to the next one. So a share that is no whole fraction
evens out over several grants, and a class that could not be served for a while gets no long series of grants."""


class QueueEntry(NamedTuple):
    """A request that may be granted next. A tuple, as one is created for every examined queue."""

    rank: Rank
    priority: Priority
    head: TenantHead
    request_class: RequestClass


@dataclass(slots=True)
class _TenantBacklog:
    """A tenant's waiting requests in a priority class, with its account."""

    account: Account
    grant_rate: GrantRate
    count: int = 0


class Queue:
    """Request classes, and which request is granted next: by priority class, then by the tenants' accounts."""

    def __init__(self, name: str, limits: SchedulerLimits, shares: FairShare, may_run: Callable[[str], bool]) -> None:
        self.name = name
        self.waiting = 0
        self.callers_waiting = 0
        """Waiting requests of callers, which status messages and refusals count."""
        self.capacities: dict[RequestKind, Capacity] = {}
        """Capacity for requests of a kind; cleared when it changes."""
        self.unhealthy: dict[RequestKind, tuple[float, tuple[tuple[str, str], ...]]] = {}
        """Endpoints that get no request for reasons other than slots, with the time; cleared with `capacities`."""
        self.considered: dict[RequestKind, tuple[float, tuple[Considered, ...]]] = {}
        """Candidates considered for requests of a kind, with the time; cleared with `capacities`."""
        self.grant_rate = GrantRate(PACE_WINDOW_SECONDS)
        self.classes: dict[RequestKind, RequestClass] = {}
        self._kinds: tuple[dict[Needs, RequestKind], dict[Needs, RequestKind]] = ({}, {})
        """Cached kinds: of callers, of durable requests."""
        self._limits = limits
        self._shares = shares
        self._may_run = may_run
        self._backlogs: tuple[dict[str, _TenantBacklog], ...] = tuple({} for _ in PRIORITIES)
        self._places: dict[str, int] = {}
        """Waiting requests of callers per tenant, over all priority classes."""
        self._by_priority = [0] * len(PRIORITIES)
        self._weight_waiting = 0.0
        self._passed_over = [0.0] * len(PRIORITIES)
        """Grants to higher priority classes since the last grant of each class, while requests waited in it."""
        self._due_after = _due_after(limits)
        self._first_due_after = min(self._due_after)

    def keeps_waiting(self, priority: Priority) -> bool:
        """Whether an arriving request of this class must wait behind waiting ones.

        Durable requests only fill free slots, so they do not delay callers unless their share is due.
        """
        if not self.waiting:
            return False
        is_due = self._passed_over[_DURABLE] >= self._due_after[_DURABLE]
        return priority is _DURABLE or bool(self.callers_waiting) or is_due

    def kind_of(self, needs: Needs, *, durable: bool = False) -> RequestKind:
        """Return the kind of a request without attempts; equal needs give the same object."""
        kinds = self._kinds[durable]
        kind = kinds.get(needs)
        if kind is None:
            if len(kinds) >= MAX_REMEMBERED_KINDS:
                kinds.clear()
            kind = kinds[needs] = RequestKind(needs, durable=durable)
        return kind

    def add(self, request: Request, now: float) -> None:
        """Add a waiting request."""
        found = self.classes.get(request.kind)
        if found is None:
            found = self.classes[request.kind] = self._new_class(request.kind)
        found.add(request)
        priority, tenant = request.spec.priority, request.spec.tenant
        if priority is not _DURABLE:
            places = self._places.get(tenant, 0)
            self._places[tenant] = places + 1
            if not places:
                self._weight_waiting += self._shares.weight(tenant)
            self.callers_waiting += 1
            if self.callers_waiting == 1:
                self.grant_rate.note_backlog(now, waiting=True)
        backlog = self._backlogs[priority].get(tenant)
        if backlog is None:
            backlog = self._backlogs[priority][tenant] = self._new_backlog(tenant, now)
        backlog.count += 1
        self._by_priority[priority] += 1
        self.waiting += 1

    def remove(self, request: Request, now: float) -> None:
        """Remove a waiting request."""
        found = self.classes[request.kind]
        found.remove(request)
        if not found.waiting:
            del self.classes[found.kind]
        priority, tenant = request.spec.priority, request.spec.tenant
        backlog = self._backlogs[priority][tenant]
        backlog.count -= 1
        if not backlog.count:
            del self._backlogs[priority][tenant]
        self._by_priority[priority] -= 1
        if not self._by_priority[priority]:
            self._passed_over[priority] = 0.0
        self.waiting -= 1
        if priority is _DURABLE:
            return
        self.callers_waiting -= 1
        places = self._places[tenant] = self._places[tenant] - 1
        if not places:
            del self._places[tenant]
            self._weight_waiting -= self._shares.weight(tenant)
        if not self.callers_waiting:
            self._weight_waiting = 0.0
            self.grant_rate.note_backlog(now, waiting=False)

    def entries(self, blocked: set[RequestClass], now: float) -> Iterator[QueueEntry]:
        """Yield the requests that may be granted next, at least one per request class."""
        overdue: Sequence[Priority] = ()
        if max(self._passed_over) >= self._first_due_after:
            overdue = [priority for priority in PRIORITIES if self._passed_over[priority] >= self._due_after[priority]]
        for request_class in self.classes.values():
            if request_class in blocked or not request_class.waiting:
                continue
            first = request_class.head()
            if first is None:
                continue
            priority, head = first
            yield QueueEntry((priority, head.account, head.place), priority, head, request_class)
            if overdue:
                yield from self._overdue(request_class, overdue, now)

    def note_grant(self, chosen: QueueEntry, waited_seconds: float, now: float) -> None:
        """Record a grant to a request that is still in the queue."""
        priority = chosen.priority
        self._backlogs[priority][chosen.head.tenant].grant_rate.note_grant(waited_seconds, now)
        self._passed_over[priority] = 0.0 if priority is not _DURABLE else self._still_owed()
        self.note_placed(priority, waited_seconds, now)

    def note_placed(self, priority: Priority, waited_seconds: float, now: float) -> None:
        """Record a grant to a request of this class, whether it waited or was placed immediately.

        The grant rate counts only callers, as status messages and refusals are based on it.
        """
        if priority is not _DURABLE:
            self.grant_rate.note_grant(waited_seconds, now)
        if self.waiting:
            self.note_passed_over(priority, 1.0)

    def note_passed_over(self, priority: Priority, share: float) -> None:
        """Record that a request of this class got a model that waiting requests need.

        `share`: the part of the grant that counts for this queue; below 1 if several queues were passed over.
        """
        for lower in PRIORITIES[priority + 1 :]:
            if self._by_priority[lower]:
                self._passed_over[lower] += share

    def places_of(self, tenant: str) -> int:
        """Return the number of waiting requests of a tenant."""
        return self._places.get(tenant, 0) + self.waiting_of(tenant, _DURABLE)

    def waiting_of(self, tenant: str, priority: Priority) -> int:
        """Return the number of waiting requests of a tenant in a priority class."""
        backlog = self._backlogs[priority].get(tenant)
        return 0 if backlog is None else backlog.count

    def waiting_in(self, priority: Priority) -> int:
        """Return the number of waiting requests in a priority class."""
        return self._by_priority[priority]

    def grant_rate_of(self, tenant: str, priority: Priority) -> GrantRate | None:
        """Return a tenant's grant rate in a priority class; None: no request of it waits there."""
        backlog = self._backlogs[priority].get(tenant)
        return None if backlog is None else backlog.grant_rate

    def reweigh(self, tenant: str, before: float) -> None:
        """Record that a tenant's weight changed from `before`."""
        if tenant in self._places:
            self._weight_waiting += self._shares.weight(tenant) - before

    def share_of(self, tenant: str) -> float:
        """Return an active tenant's share among all waiting callers and itself, 0 to 1."""
        weight = self._shares.weight(tenant)
        others = self._weight_waiting - (weight if tenant in self._places else 0.0)
        return weight / (max(0.0, others) + weight)

    def account_after(self, tenant: str, requests: int, cost: float) -> float:
        """Return the account of an active tenant after this many more of its requests are served.

        `cost`: tokens per request, if none of the tenant was served yet.
        """
        account = self._shares.active[tenant]
        each = account.mean_cost if account.was_charged else max(MIN_COST, cost) / account.weight
        return self._shares.account(tenant) + max(0.0, requests * each - account.credit)

    def last_of_furthest(self, priority: Priority, spared: str | None, cost: float) -> tuple[float, int] | None:
        """Return the last request of the tenant with the highest account after all its requests of a class are served.

        Returns that account and the request's key; None: there is none. `spared`: a tenant to skip. `cost`: see
        `account_after`.
        """
        others = [
            (self.account_after(tenant, backlog.count, cost), tenant)
            for tenant, backlog in self._backlogs[priority].items()
            if tenant != spared
        ]
        if not others:
            return None
        account, furthest = max(others)
        fair_queues = (request_class.priorities[priority] for request_class in self.classes.values())
        lasts = (fair_queue.last_of(furthest) for fair_queue in fair_queues if fair_queue is not None)
        return account, max(place for place in lasts if place is not None)[2]

    def position_of(self, request: Request) -> int:
        """Return the position in the queue, from 1: exact within a tenant, estimated between tenants."""
        priority, mine = request.spec.priority, self._shares.active[request.spec.tenant]
        own, passed = self._own_ahead(request), 0
        until = mine.served + own * mine.mean_cost
        backlogs = self._backlogs[priority]
        looks_at_ties = len(backlogs) <= MAX_TENANTS_WITH_TIES
        for other, backlog in islice(backlogs.items(), MAX_TENANTS_COMPARED):
            account = backlog.account
            behind = until - account.served
            if behind < 0 or account is mine:
                continue
            turns = behind / account.mean_cost
            if turns >= backlog.count:
                passed += backlog.count
                continue
            whole = ceil(turns)
            if looks_at_ties and whole == turns and self._goes_first(other, whole, request):
                whole += 1
            passed += whole
        if len(backlogs) > MAX_TENANTS_COMPARED:
            passed = int(passed * len(backlogs) / MAX_TENANTS_COMPARED)
        return 1 + sum(self._by_priority[:priority]) + own + passed

    def _own_ahead(self, request: Request) -> int:
        priority, tenant, place = request.spec.priority, request.spec.tenant, request.place
        ahead = 0
        for request_class in self.classes.values():
            fair_queue = request_class.priorities[priority]
            if fair_queue is not None:
                ahead += fair_queue.ahead_of(tenant, place)
        return ahead

    def _goes_first(self, other: str, turns: int, request: Request) -> bool:
        """Whether the other tenant's next request precedes this one if accounts are equal after this many grants."""
        priority, place = request.spec.priority, request.place
        for request_class in self.classes.values():
            fair_queue = request_class.priorities[priority]
            if fair_queue is not None:
                next_place = fair_queue.queue_position(other, turns)
                if next_place is not None and next_place < place:
                    return True
        return False

    def _overdue(self, request_class: RequestClass, priorities: Sequence[Priority], now: float) -> Iterator[QueueEntry]:
        """Yield the request of each overdue class, most often passed over first.

        Durable requests waited long before they were offered, so their share counts from the first grant.
        """
        for priority in priorities:
            head = request_class.head_in(priority)
            patience = 0.0 if priority is _DURABLE else self._limits.lower_band_patience_seconds
            if head is not None and now - head.place[1] >= patience:
                deadline_at, arrived_at, key = head.place
                how_often = self._passed_over[priority] / self._due_after[priority]
                yield QueueEntry((-1, -how_often, (arrived_at, deadline_at, key)), priority, head, request_class)

    def _still_owed(self) -> float:
        """Return the grants still owed to durable requests when one is granted."""
        priority = _DURABLE
        return max(0.0, min(_MOST_SAVED_GRANTS, self._passed_over[priority] - self._due_after[priority]))

    def _new_backlog(self, tenant: str, now: float) -> _TenantBacklog:
        grant_rate = GrantRate(PACE_WINDOW_SECONDS)
        grant_rate.note_backlog(now, waiting=True)
        return _TenantBacklog(self._shares.active[tenant], grant_rate)

    def _new_class(self, kind: RequestKind) -> RequestClass:
        return RequestClass(self.name, kind, self._shares.account, self._may_run)


def _due_after(limits: SchedulerLimits) -> tuple[float, ...]:
    """Return for each priority class after how many grants to higher ones it gets one; infinity: never."""
    durable = max(1.0, 1.0 / limits.durable_share - 1.0) if limits.durable_share > 0.0 else inf
    return tuple(durable if priority is _DURABLE else limits.lower_band_every - 1.0 for priority in PRIORITIES)
