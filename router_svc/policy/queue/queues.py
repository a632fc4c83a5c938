"""All queues, their waiting requests, and the concurrency caps of tenants."""

from collections.abc import Collection, Iterator, Mapping

from router_svc.policy.endpoints.candidate_index import CandidateIndex
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.pool_settings import Settings, TenantSettings
from router_svc.policy.queue.fair_share import FairShare
from router_svc.policy.queue.queue import Queue
from router_svc.policy.queue.request_class import RequestClass
from router_svc.policy.router_request import Request
from weft.kernel.requests.placement_request import PoolQueue

MAX_REMEMBERED_TENANTS = 10_000
"""Maximum idle tenants with stored accounts; the one that left first is dropped first."""
MAX_FAIR_LAG_TOKENS = 200_000.0
"""Maximum lag of a tenant's account behind the highest one, so that a tenant without competition for a long time is not
held back for hours afterwards."""


class TenantTable:
    """The settings of every tenant, which may change while its requests wait and run."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._declared: Mapping[str, TenantSettings] = {}
        self._known = settings.tenants

    def get(self, name: str) -> TenantSettings:
        """Return the settings of a tenant."""
        return self._known.get(name, self._settings.default_tenant)

    def declare(self, tenants: Mapping[str, TenantSettings]) -> list[str]:
        """Replace the declared tenants. Returns the tenants with changed settings."""
        touched = sorted({*self._declared, *tenants})
        before = {name: self.get(name) for name in touched}
        self._declared = dict(tenants)
        self._known = {**self._settings.tenants, **tenants}
        return [name for name in touched if self.get(name) != before[name]]


class TenantCaps:
    """Counts each tenant's running requests against its maximum."""

    def __init__(self, tenants: TenantTable) -> None:
        self._tenants = tenants
        self._running: dict[str, int] = {}

    def may_run(self, tenant: str) -> bool:
        """Whether the tenant may have another request running."""
        most = self._tenants.get(tenant).max_in_flight
        return not most or self._running.get(tenant, 0) < most

    def most(self, tenant: str) -> int:
        """Return the tenant's maximum of running requests; 0: unlimited."""
        return self._tenants.get(tenant).max_in_flight

    def running(self, tenant: str) -> int:
        """Return the number of running requests of the tenant."""
        return self._running.get(tenant, 0)

    def take(self, tenant: str) -> None:
        """Add a running request."""
        self._running[tenant] = self._running.get(tenant, 0) + 1

    def release(self, tenant: str) -> bool:
        """Remove a running request. Returns whether the tenant was at its cap."""
        most, running = self._tenants.get(tenant).max_in_flight, self._running[tenant]
        if running > 1:
            self._running[tenant] = running - 1
        else:
            del self._running[tenant]
        return 0 < most <= running


class Queues:
    """All queues by name. A queue is created on first use and exists while its target or waiting requests do."""

    def __init__(self, limits: SchedulerLimits, settings: Settings) -> None:
        self._limits = limits
        self.tenants = TenantTable(settings)
        self.shares = FairShare(
            lambda tenant: self.tenants.get(tenant).weight,
            max_lag=MAX_FAIR_LAG_TOKENS,
            max_remembered=MAX_REMEMBERED_TENANTS,
        )
        self.caps = TenantCaps(self.tenants)
        self._queues: dict[str, Queue] = {}
        self._backlogged: dict[str, Queue] = {}
        self._of_tenant: dict[str, set[str]] = {}
        """Queues in which each tenant waits."""
        self.waiting = 0
        self.durable_waiting = 0

    @property
    def callers_waiting(self) -> int:
        """Number of waiting requests of callers."""
        return self.waiting - self.durable_waiting

    def get(self, name: str) -> Queue | None:
        """Return a queue; None: it was never used."""
        return self._queues.get(name)

    def open(self, name: str) -> Queue:
        """Return a queue; create it if needed."""
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = Queue(name, self._limits, self.shares, self.caps.may_run)
        return queue

    def drop(self, name: str) -> None:
        """Remove a queue whose target left the mesh, unless requests wait in it."""
        if name not in self._backlogged:
            self._queues.pop(name, None)

    def backlogged(self) -> tuple[Queue, ...]:
        """Return the queues with waiting requests."""
        return tuple(self._backlogged.values())

    def backlogged_of(self, names: Collection[str]) -> list[Queue]:
        """Return the named queues with waiting requests, in a reproducible order."""
        if len(names) > 1:
            names = sorted(names)
        return [self._backlogged[name] for name in names if name in self._backlogged]

    def add(self, request: Request, now: float) -> Queue:
        """Add a waiting request. Returns its queue."""
        queue = self.open(request.queue)
        queue.add(request, now)
        self._backlogged[queue.name] = queue
        tenant = request.spec.tenant
        if queue.places_of(tenant) == 1:
            self._of_tenant.setdefault(tenant, set()).add(queue.name)
        self.waiting += 1
        self.durable_waiting += request.kind.durable
        return queue

    def remove(self, request: Request, now: float) -> None:
        """Remove a waiting request."""
        queue = self._queues[request.queue]
        queue.remove(request, now)
        self.waiting -= 1
        self.durable_waiting -= request.kind.durable
        if not queue.waiting:
            del self._backlogged[queue.name]
        tenant = request.spec.tenant
        if not queue.places_of(tenant):
            names = self._of_tenant[tenant]
            names.discard(queue.name)
            if not names:
                del self._of_tenant[tenant]

    def declare_tenants(self, tenants: Mapping[str, TenantSettings]) -> set[str]:
        """Apply changed settings of tenants. Returns the queues in which a tenant waits that may now run more."""
        touched = set[str]()
        for tenant in self.tenants.declare(tenants):
            waits_in = self._of_tenant.get(tenant, set())
            before = self.shares.reweigh(tenant)
            for name in waits_in:
                self._queues[name].reweigh(tenant, before)
            if self.caps.may_run(tenant):
                touched |= self.reactivate(tenant)
        return touched

    def reactivate(self, tenant: str) -> set[str]:
        """Reactivate a tenant that left its cap. Returns the queues in which it waits."""
        names = self._of_tenant.get(tenant, set())
        for name in names:
            for request_class in self._queues[name].classes.values():
                _reactivate(request_class, tenant)
        return set(names)

    def classes(self) -> Iterator[RequestClass]:
        """Yield all request classes with waiting requests."""
        return (request_class for queue in self.backlogged() for request_class in tuple(queue.classes.values()))


def _reactivate(request_class: RequestClass, tenant: str) -> None:
    for fair_queue in request_class.fair_queues():
        fair_queue.reactivate(tenant)


def queue_lengths(index: CandidateIndex, queues: Queues, limits: SchedulerLimits) -> list[PoolQueue]:
    """Return the length of each route and of each pool with a member, sorted by name.

    Durable requests take no place of callers and do not count as waiting.
    """
    lengths: list[PoolQueue] = []
    for name in sorted(index.table.queues()):
        queue = queues.get(name)
        lengths.append(
            PoolQueue(
                pool=name,
                waiting=queue.callers_waiting if queue is not None else 0,
                max_waiting=limits.queue_depth_per_runner * len(index.table.members(name)),
                running=index.in_flight_of_queue(name),
                average_wait_seconds=queue.grant_rate.average_wait_seconds if queue is not None else None,
            )
        )
    return lengths
