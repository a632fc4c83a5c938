"""The queue of one target: a pool, or a route."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from math import ceil, inf
from typing import TYPE_CHECKING, NamedTuple

from router_svc.policy.endpoints.candidates import Needs
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.queue.fair_queue import TenantHead
from router_svc.policy.queue.fair_share import MIN_COST, Account, FairShare
from router_svc.policy.queue.request_class import BAND_OF, BANDS, PRIORITIES, Rank, RequestClass, Skipped, rank_of
from router_svc.policy.router_request import Request, RequestKind
from weft.kernel.requests.request_values import CALLER_CLASSES, Priority

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

MAX_REMEMBERED_KINDS = 1_024
"""Maximum request kinds that a queue caches, as callers choose names of tools freely."""
_DURABLE = Priority.DURABLE
_CALLERS_BAND, _DURABLE_BAND = BAND_OF[Priority.NORMAL], BAND_OF[_DURABLE]
_MOST_SAVED_GRANTS = 1.0
"""Maximum grants that durable requests carry over in addition to the next one. So a share that is no whole fraction
evens out over several grants, and a band that could not be served for a while gets no long series of grants."""


class QueueEntry(NamedTuple):
    """A request that may be granted next. A tuple, as one is created for every examined queue."""

    rank: Rank
    priority: Priority
    head: TenantHead
    request_class: RequestClass


@dataclass(slots=True)
class _TenantBacklog:
    """A tenant's waiting requests in a priority class."""

    grant_rate: GrantRate
    count: int = 0
    passed_over: float = 0.0
    """The tenant's grants in higher classes since its last one in this class."""


class Queue:
    """Request classes, and which request is granted next: by band, the tenants' accounts, then a tenant's classes."""

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
        self._places: tuple[dict[str, int], ...] = tuple({} for _ in BANDS)
        """Waiting requests per band and tenant."""
        self._by_band = [0] * len(BANDS)
        self._weight_waiting = 0.0
        self._passed_over = [0.0] * len(BANDS)
        """Grants to higher bands since the last grant of each band, while requests waited in it."""
        self._due_after = _due_after(limits)
        self._first_due_after = min(self._due_after)

    def keeps_waiting(self, priority: Priority) -> bool:
        """Whether an arriving request of this class must wait behind waiting ones.

        Durable requests only fill free slots, so they do not delay callers unless their share is due.
        """
        if not self.waiting:
            return False
        is_due = self._passed_over[_DURABLE_BAND] >= self._due_after[_DURABLE_BAND]
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
        priority, tenant = request.spec.priority, request.spec.tenant
        self._shares.begin_wait(tenant)
        found = self.classes.get(request.kind)
        if found is None:
            found = self.classes[request.kind] = self._new_class(request.kind)
        found.add(request)
        band = BAND_OF[priority]
        places = self._places[band].get(tenant, 0)
        self._places[band][tenant] = places + 1
        if band == _CALLERS_BAND and not places:
            self._weight_waiting += self._shares.weight(tenant)
        if priority is not _DURABLE:
            self.callers_waiting += 1
            if self.callers_waiting == 1:
                self.grant_rate.note_backlog(now, waiting=True)
        backlog = self._backlogs[priority].get(tenant)
        if backlog is None:
            backlog = self._backlogs[priority][tenant] = self._new_backlog(now)
        backlog.count += 1
        self._by_band[band] += 1
        self.waiting += 1

    def remove(self, request: Request, now: float) -> None:
        """Remove a waiting request."""
        found = self.classes[request.kind]
        found.remove(request, now)
        if not found.waiting:
            del self.classes[found.kind]
        priority, tenant = request.spec.priority, request.spec.tenant
        backlog = self._backlogs[priority][tenant]
        backlog.count -= 1
        if not backlog.count:
            del self._backlogs[priority][tenant]
        band = BAND_OF[priority]
        self._by_band[band] -= 1
        if not self._by_band[band]:
            self._passed_over[band] = 0.0
        self._places[band][tenant] -= 1
        if not self._places[band][tenant]:
            del self._places[band][tenant]
            if band == _CALLERS_BAND:
                self._weight_waiting -= self._shares.weight(tenant)
        self._shares.end_wait(tenant)
        self.waiting -= 1
        if priority is _DURABLE:
            return
        self.callers_waiting -= 1
        if not self.callers_waiting:
            self._weight_waiting = 0.0
            self.grant_rate.note_backlog(now, waiting=False)

    def entries(
        self, blocked: set[RequestClass], now: float, skipped: Mapping[RequestClass, Skipped]
    ) -> Iterator[QueueEntry]:
        """Yield the requests that may be granted next, at least one per request class."""
        is_due = max(self._passed_over) >= self._first_due_after
        for request_class in self.classes.values():
            if request_class in blocked or not request_class.waiting:
                continue
            but = skipped.get(request_class, ()) if skipped else ()
            first = request_class.head(but)
            if first is None:
                continue
            priority, head = first
            yield QueueEntry(rank_of(first), priority, head, request_class)
            for entry in self._overdue_classes(request_class, head, now):
                if (entry.priority, entry.head.tenant) not in but:
                    yield entry
            if is_due:
                yield from self._overdue_bands(request_class, now, but)

    def note_grant(self, chosen: QueueEntry, waited_seconds: float, now: float) -> None:
        """Record a grant to a request that is still in the queue."""
        priority, tenant = chosen.priority, chosen.head.tenant
        backlog = self._backlogs[priority][tenant]
        backlog.grant_rate.note_grant(waited_seconds, now)
        backlog.passed_over = 0.0
        self._passed_over[BAND_OF[priority]] = 0.0 if priority is not _DURABLE else self._still_owed()
        self.note_placed(tenant, priority, waited_seconds, now)

    def note_placed(self, tenant: str, priority: Priority, waited_seconds: float, now: float) -> None:
        """Record a grant to a request of a tenant and class, whether it waited or was placed immediately.

        The grant rate counts only callers, as status messages and refusals are based on it.
        """
        if priority is not _DURABLE:
            self.grant_rate.note_grant(waited_seconds, now)
        if self.waiting:
            self.note_passed_over(tenant, priority, 1.0)

    def note_passed_over(self, tenant: str, priority: Priority, share: float) -> None:
        """Record that a request of a tenant and class got a model that waiting requests need.

        `share`: the part of the grant that counts for this queue; below 1 if several queues were passed over.
        """
        band = BAND_OF[priority]
        for lower_band in range(band + 1, len(BANDS)):
            if self._by_band[lower_band]:
                self._passed_over[lower_band] += share
        for lower in BANDS[band]:
            if lower > priority and (backlog := self._backlogs[lower].get(tenant)) is not None:
                backlog.passed_over += share

    def places_of(self, tenant: str) -> int:
        """Return the number of waiting requests of a tenant."""
        return sum(places.get(tenant, 0) for places in self._places)

    @property
    def tenants_waiting(self) -> int:
        """Number of tenants with waiting requests of callers."""
        return len(self._places[_CALLERS_BAND])

    def callers_of(self, tenant: str) -> int:
        """Return the number of waiting requests of a tenant's callers."""
        return self._places[_CALLERS_BAND].get(tenant, 0)

    def waiting_of(self, tenant: str, priority: Priority) -> int:
        """Return the number of waiting requests of a tenant in a priority class."""
        backlog = self._backlogs[priority].get(tenant)
        return 0 if backlog is None else backlog.count

    def grant_rate_of(self, tenant: str, priority: Priority) -> GrantRate | None:
        """Return a tenant's grant rate in a priority class; None: no request of it waits there."""
        backlog = self._backlogs[priority].get(tenant)
        return None if backlog is None else backlog.grant_rate

    def reweigh(self, tenant: str, before: float) -> None:
        """Record that a tenant's weight changed from `before`."""
        if self.callers_of(tenant):
            self._weight_waiting += self._shares.weight(tenant) - before

    def share_of(self, tenant: str) -> float:
        """Return an active tenant's share among all waiting callers and itself, 0 to 1."""
        weight = self._shares.weight(tenant)
        others = self._weight_waiting - (weight if self.callers_of(tenant) else 0.0)
        return weight / (max(0.0, others) + weight)

    def account_after(self, tenant: str, requests: int, cost: float) -> float:
        """Return the account of an active tenant after this many more of its requests are served.

        `cost`: tokens per request, if none of the tenant was served yet.
        """
        account = self._shares.active[tenant]
        each = account.mean_cost if account.was_charged else max(MIN_COST, cost) / account.weight
        return self._shares.account(tenant) + max(0.0, requests * each - account.credit)

    def last_of_furthest(self, spared: str | None, cost: float) -> tuple[float, int] | None:
        """Return the last request of the tenant with the highest account after all its callers' requests are served.

        Returns that account and the request's key; None: there is none. It is of the lowest class that has more than
        its share of the tenant's places. `spared`: a tenant to skip. `cost`: see `account_after`.
        """
        others = [
            (self.account_after(tenant, places, cost), tenant)
            for tenant, places in self._places[_CALLERS_BAND].items()
            if tenant != spared
        ]
        if not others:
            return None
        account, furthest = max(others)
        kept = self.callers_of(furthest) // self._limits.lower_class_every
        lowest = next(each for each in reversed(CALLER_CLASSES) if self.waiting_of(furthest, each) > kept)
        return account, self.last_of(furthest, lowest)

    def last_of(self, tenant: str, priority: Priority) -> int:
        """Return the key of a tenant's last request in a priority class; there must be one."""
        fair_queues = (request_class.priorities[priority] for request_class in self.classes.values())
        lasts = (fair_queue.last_of(tenant) for fair_queue in fair_queues if fair_queue is not None)
        return max(queue_key for queue_key in lasts if queue_key is not None)[2]

    def position_of(self, request: Request) -> int:
        """Return the position in the queue, from 1: exact within a tenant's class, estimated otherwise."""
        band, mine = BAND_OF[request.spec.priority], self._shares.active[request.spec.tenant]
        own, passed = self._own_ahead(request), 0
        until = mine.served + own * mine.mean_cost
        places = self._places[band]
        for other, waiting in islice(places.items(), MAX_TENANTS_COMPARED):
            account = self._shares.active[other]
            behind = until - account.served
            if behind < 0 or account is mine:
                continue
            turns = behind / account.mean_cost
            whole = ceil(turns)
            if whole == turns and _goes_first(account, whole, mine, own):
                whole += 1
            passed += min(whole, waiting)
        if len(places) > MAX_TENANTS_COMPARED:
            passed = int(passed * len(places) / MAX_TENANTS_COMPARED)
        return 1 + sum(self._by_band[:band]) + own + passed

    def _own_ahead(self, request: Request) -> int:
        """Return how many of its tenant's requests go first: of its class, and of higher ones up to their share."""
        priority, tenant, queue_key = request.spec.priority, request.spec.tenant, request.queue_key
        ahead = 0
        for request_class in self.classes.values():
            fair_queue = request_class.priorities[priority]
            if fair_queue is not None:
                ahead += fair_queue.ahead_of(tenant, queue_key)
        higher = sum(self.waiting_of(tenant, each) for each in BANDS[BAND_OF[priority]] if each < priority)
        return min(ahead + higher, self._limits.lower_class_every * (ahead + 1) - 1)

    def _overdue_classes(self, request_class: RequestClass, head: TenantHead, now: float) -> Iterator[QueueEntry]:
        """Yield the requests of the tenant in turn whose class was passed over for higher ones, most often first."""
        due_after = self._due_after[_CALLERS_BAND]
        for priority in CALLER_CLASSES[1:]:
            backlog = self._backlogs[priority].get(head.tenant)
            if backlog is None or backlog.passed_over < due_after:
                continue
            queue_key = request_class.first_of(head.tenant, priority)
            if queue_key is not None and now - queue_key[1] >= self._limits.lower_class_patience_seconds:
                rank = (_CALLERS_BAND, head.account, head.turn, -backlog.passed_over, queue_key)
                yield QueueEntry(rank, priority, head._replace(queue_key=queue_key), request_class)

    def _overdue_bands(self, request_class: RequestClass, now: float, skipped: Skipped) -> Iterator[QueueEntry]:
        """Yield the request of each overdue band, most often passed over first.

        Durable requests waited long before they were offered, so their share counts from the first grant.
        """
        for band, priorities in enumerate(BANDS):
            how_often = self._passed_over[band] / self._due_after[band]
            found = request_class.head_in(priorities, skipped) if how_often >= 1.0 else None
            if found is None:
                continue
            priority, head = found
            deadline_at, arrived_at, key = head.queue_key
            patience = 0.0 if priority is _DURABLE else self._limits.lower_class_patience_seconds
            if now - arrived_at >= patience:
                rank = (-1, -how_often, 0, 0.0, (arrived_at, deadline_at, key))
                yield QueueEntry(rank, priority, head, request_class)

    def _still_owed(self) -> float:
        """Return the grants still owed to durable requests when one is granted."""
        band = _DURABLE_BAND
        return max(0.0, min(_MOST_SAVED_GRANTS, self._passed_over[band] - self._due_after[band]))

    def _new_backlog(self, now: float) -> _TenantBacklog:
        grant_rate = GrantRate(PACE_WINDOW_SECONDS)
        grant_rate.note_backlog(now, waiting=True)
        return _TenantBacklog(grant_rate)

    def _new_class(self, kind: RequestKind) -> RequestClass:
        return RequestClass(self.name, kind, self._shares.standing, self._may_run)


def _goes_first(other: Account, others: int, mine: Account, own: int) -> bool:
    """Whether another tenant precedes one with an equal account, after this many grants of each."""
    if others and own and other.mean_cost != mine.mean_cost:
        # It got its last grant at the lower account, so earlier.
        return other.mean_cost > mine.mean_cost
    return (others, other.turn) < (own, mine.turn)


def _due_after(limits: SchedulerLimits) -> tuple[float, ...]:
    """Return for each band after how many grants to higher ones it gets one; infinity: never.

    The figure of callers also holds for each class of a tenant.
    """
    durable = max(1.0, 1.0 / limits.durable_share - 1.0) if limits.durable_share > 0.0 else inf
    return (inf, limits.lower_class_every - 1.0, durable)
