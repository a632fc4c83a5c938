"""All lines, and who waits in them."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from router_svc.policy.endpoints.candidate_index import CandidateIndex
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.queue.fair_share import FairShare
from router_svc.policy.queue.live_request import LiveRequest, RequestClass
from router_svc.policy.queue.queue import Queue
from router_svc.policy.queue.tenant_caps import TenantCaps
from router_svc.policy.settings import Settings


class Queues:
    """A line is made when it is first needed, and lives as long as the mesh has it or somebody waits in it."""

    def __init__(self, limits: SchedulerLimits, settings: Settings) -> None:
        self._limits = limits
        self.shares = FairShare(
            lambda tenant: settings.tenant(tenant).weight,
            max_lag=limits.max_fair_lag_tokens,
            max_remembered=limits.max_remembered_tenants,
        )
        self.caps = TenantCaps(settings)
        self._queues: dict[str, Queue] = {}
        self._backlogged: dict[str, Queue] = {}
        self._of_tenant: dict[str, set[str]] = {}
        """In which lines a tenant waits."""
        self.waiting = 0
        self.durable_waiting = 0
        """Of them, durable requests."""

    @property
    def callers_waiting(self) -> int:
        """Requests of callers that wait."""
        return self.waiting - self.durable_waiting

    def get(self, name: str) -> Queue | None:
        """None: nobody has asked for it yet."""
        return self._queues.get(name)

    def open(self, name: str) -> Queue:
        """The line so called, new if need be."""
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = Queue(name, self._limits, self.shares, self.caps.may_run)
        return queue

    def drop(self, name: str) -> None:
        """The mesh has no line of this name any more, and nobody waits in it."""
        if name not in self._backlogged:
            self._queues.pop(name, None)

    def backlogged(self) -> tuple[Queue, ...]:
        """Those in which somebody waits."""
        return tuple(self._backlogged.values())

    def backlogged_of(self, names: Collection[str]) -> list[Queue]:
        """Those of these lines in which somebody waits, in an order that does not depend on chance."""
        if len(names) > 1:
            names = sorted(names)
        return [self._backlogged[name] for name in names if name in self._backlogged]

    def add(self, request: LiveRequest, now: float) -> Queue:
        """It waits from now on. Returns where."""
        queue = self.open(request.queue)
        queue.add(request, now)
        self._backlogged[queue.name] = queue
        tenant = request.arrival.tenant
        if queue.places_of(tenant) == 1:
            self._of_tenant.setdefault(tenant, set()).add(queue.name)
        self.waiting += 1
        self.durable_waiting += request.kind.durable
        return queue

    def remove(self, request: LiveRequest, now: float) -> None:
        """It does not wait any more."""
        queue = self._queues[request.queue]
        queue.remove(request, now)
        self.waiting -= 1
        self.durable_waiting -= request.kind.durable
        if not queue.waiting:
            del self._backlogged[queue.name]
        tenant = request.arrival.tenant
        if not queue.places_of(tenant):
            names = self._of_tenant[tenant]
            names.discard(queue.name)
            if not names:
                del self._of_tenant[tenant]

    def reactivate(self, tenant: str) -> set[str]:
        """The tenant may have more running again. Returns the lines in which it waits."""
        names = self._of_tenant.get(tenant, set())
        for name in names:
            for request_class in self._queues[name].classes.values():
                _reactivate(request_class, tenant)
        return set(names)

    def classes(self) -> Iterator[RequestClass]:
        """All in which somebody waits."""
        return (request_class for queue in self.backlogged() for request_class in tuple(queue.classes.values()))


def _reactivate(request_class: RequestClass, tenant: str) -> None:
    for fair_queue in request_class.fair_queues():
        fair_queue.reactivate(tenant)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLength:
    """One line at one moment."""

    pool: str
    """The pool, or ROUTE_PREFIX and a route's name."""
    waiting: int
    """Requests of callers; durable ones take none of their places."""
    max_waiting: int
    running: int
    """Requests in flight on its models that this router granted."""
    average_wait_seconds: float | None = None
    """Of the requests that were placed lately; None: none were."""


def queue_lengths(index: CandidateIndex, queues: Queues, limits: SchedulerLimits) -> list[QueueLength]:
    """Every pool with a member and every route, in order of their names."""
    return [_length(name, index, queues, limits) for name in sorted(index.table.queues())]


def _length(name: str, index: CandidateIndex, queues: Queues, limits: SchedulerLimits) -> QueueLength:
    queue = queues.get(name)
    return QueueLength(
        pool=name,
        waiting=queue.callers_waiting if queue is not None else 0,
        max_waiting=limits.queue_depth_per_runner * len(index.table.members(name)),
        running=index.in_flight_of_queue(name),
        average_wait_seconds=queue.grant_rate.average_wait_seconds if queue is not None else None,
    )
