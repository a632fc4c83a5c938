"""All lines, and who waits in them."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from router_svc.policy.endpoints.candidate_index import CandidateIndex
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.queue.fair_share import FairShare
from router_svc.policy.queue.live_request import LiveRequest, RequestClass
from router_svc.policy.queue.queue import Line
from router_svc.policy.queue.tenant_caps import TenantCaps


class Lines:
    """A line is made when it is first needed, and lives as long as the mesh has it or somebody waits in it."""

    def __init__(self, limits: SchedulerLimits, shares: FairShare, caps: TenantCaps) -> None:
        self._limits = limits
        self._shares = shares
        self._caps = caps
        self._lines: dict[str, Line] = {}
        self._backlogged: dict[str, Line] = {}
        self._of_tenant: dict[str, set[str]] = {}
        """In which lines a tenant waits."""
        self.waiting = 0
        self.durable_waiting = 0
        """Of them, durable requests."""

    @property
    def callers_waiting(self) -> int:
        """Requests of callers that wait."""
        return self.waiting - self.durable_waiting

    def get(self, name: str) -> Line | None:
        """None: nobody has asked for it yet."""
        return self._lines.get(name)

    def open(self, name: str) -> Line:
        """The line so called, new if need be."""
        line = self._lines.get(name)
        if line is None:
            line = self._lines[name] = Line(name, self._limits, self._shares, self._caps.may_run)
        return line

    def drop(self, name: str) -> None:
        """The mesh has no line of this name any more, and nobody waits in it."""
        if name not in self._backlogged:
            self._lines.pop(name, None)

    def backlogged(self) -> tuple[Line, ...]:
        """Those in which somebody waits."""
        return tuple(self._backlogged.values())

    def backlogged_of(self, names: Collection[str]) -> list[Line]:
        """Those of these lines in which somebody waits, in an order that does not depend on chance."""
        if len(names) > 1:
            names = sorted(names)
        return [self._backlogged[name] for name in names if name in self._backlogged]

    def add(self, request: LiveRequest, now: float) -> Line:
        """It waits from now on. Returns where."""
        line = self.open(request.line)
        line.add(request, now)
        self._backlogged[line.name] = line
        tenant = request.arrival.tenant
        if line.places_of(tenant) == 1:
            self._of_tenant.setdefault(tenant, set()).add(line.name)
        self.waiting += 1
        self.durable_waiting += request.kind.durable
        return line

    def remove(self, request: LiveRequest, now: float) -> None:
        """It does not wait any more."""
        line = self._lines[request.line]
        line.remove(request, now)
        self.waiting -= 1
        self.durable_waiting -= request.kind.durable
        if not line.waiting:
            del self._backlogged[line.name]
        tenant = request.arrival.tenant
        if not line.places_of(tenant):
            names = self._of_tenant[tenant]
            names.discard(line.name)
            if not names:
                del self._of_tenant[tenant]

    def list_again(self, tenant: str) -> set[str]:
        """The tenant may have more running again. Returns the lines in which it waits."""
        names = self._of_tenant.get(tenant, set())
        for name in names:
            for of in self._lines[name].classes.values():
                _list_again(of, tenant)
        return set(names)

    def classes(self) -> Iterator[RequestClass]:
        """All in which somebody waits."""
        return (of for line in self.backlogged() for of in tuple(line.classes.values()))


def _list_again(of: RequestClass, tenant: str) -> None:
    for queue in of.queues():
        queue.list_again(tenant)


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


def queue_lengths(index: CandidateIndex, lines: Lines, limits: SchedulerLimits) -> list[QueueLength]:
    """Every pool with a member and every route, in order of their names."""
    return [_length(name, index, lines, limits) for name in sorted(index.table.lines())]


def _length(name: str, index: CandidateIndex, lines: Lines, limits: SchedulerLimits) -> QueueLength:
    line = lines.get(name)
    return QueueLength(
        pool=name,
        waiting=line.callers_waiting if line is not None else 0,
        max_waiting=limits.queue_depth_per_runner * len(index.table.members(name)),
        running=index.in_flight_of_line(name),
        average_wait_seconds=line.pace.average_wait_seconds if line is not None else None,
    )
