"""What came of it: counted while the simulation runs."""

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from router_svc.policy.arrival import Arrival
from router_svc.simulation.hosts import Instance, Phase, Targets
from router_svc.simulation.traffic import SimulatedRequest
from weft.kernel.reasons import Reason
from weft.kernel.request import Priority


@dataclass(frozen=True, slots=True)
class RequestGroup:
    """What requests are told apart by."""

    tenant: str
    target: str
    band: Priority


@dataclass(slots=True, kw_only=True)
class GroupMetrics:
    """Requests of one kind."""

    requests: int = 0
    served: int = 0
    waits: "array[float]" = field(default_factory=lambda: array("d"))
    """Of those that were served: seconds from the arrival to the grant of the attempt that succeeded."""
    refusals: Counter[Reason] = field(default_factory=Counter)
    refusal_waits: "array[float]" = field(default_factory=lambda: array("d"))
    """Seconds from the arrival until it was refused or lost."""
    offered_cost: float = 0.0
    """Prompt and output tokens that were asked for."""
    served_cost: float = 0.0
    """Of those served before the last arrival was due: prompt tokens that were not cached, and output tokens."""
    good_tokens: int = 0
    """Output tokens of requests that were served, and in time."""

    def add(self, other: "GroupMetrics") -> None:
        """Count another's too."""
        self.requests += other.requests
        self.served += other.served
        self.waits.extend(other.waits)
        self.refusals.update(other.refusals)
        self.refusal_waits.extend(other.refusal_waits)
        self.offered_cost += other.offered_cost
        self.served_cost += other.served_cost
        self.good_tokens += other.good_tokens


@dataclass(frozen=True, slots=True)
class Waits:
    """Waits of many, in seconds."""

    p50: float
    p95: float
    p99: float
    longest: float

    @staticmethod
    def of(values: Iterable[float]) -> "Waits | None":
        """None: there were none."""
        ordered = sorted(values)
        if not ordered:
            return None
        last = len(ordered) - 1
        return Waits(*(ordered[round(last * share)] for share in (0.5, 0.95, 0.99, 1.0)))


class RunMetrics:
    """All counts."""

    def __init__(self, horizon_seconds: float) -> None:
        self._horizon_seconds = horizon_seconds
        self.by_group: dict[RequestGroup, GroupMetrics] = {}
        self.cold_waits = array("d")
        """Seconds in which somebody waited for a target with nothing loaded, until a load began."""
        self.estimate_errors = array("d")
        """Seconds between when a request's first estimate said that its turn would come, and when it came."""
        self.requests = 0
        self.attempts = 0
        self.first_attempts = 0
        self.attempts_in_outage = 0
        """Of them, those on hosts that were failing then."""
        self.first_attempts_in_outage = 0

    def arrived(self, request: SimulatedRequest) -> None:
        """Somebody asks."""
        self.requests += 1
        tally = self._tally(request)
        tally.requests += 1
        tally.offered_cost += request.arrival.prompt_tokens + request.output_tokens

    def attempted(self, number: int, *, host_is_failing: bool) -> None:
        """A request is tried for the n-th time."""
        is_first = number == 1
        self.attempts += 1
        self.first_attempts += is_first
        self.attempts_in_outage += host_is_failing
        self.first_attempts_in_outage += is_first and host_is_failing

    def served(self, request: SimulatedRequest, *, waited_seconds: float, cached_tokens: int, now: float) -> None:
        """A request was served, in time."""
        tally = self._tally(request)
        tally.served += 1
        tally.waits.append(waited_seconds)
        tally.good_tokens += request.output_tokens
        if now <= self._horizon_seconds:
            tally.served_cost += request.arrival.prompt_tokens - cached_tokens + request.output_tokens

    def lost(self, request: SimulatedRequest, reason: Reason, now: float) -> None:
        """A request was refused, or failed."""
        tally = self._tally(request)
        tally.refusals[reason] += 1
        tally.refusal_waits.append(now - request.arrival.arrived_at)

    def total(self, only: Iterable[RequestGroup] | None = None) -> GroupMetrics:
        """All of those together; of everybody when none are named."""
        total = GroupMetrics()
        for who in self.by_group if only is None else only:
            total.add(self.by_group[who])
        return total

    def _tally(self, request: SimulatedRequest) -> GroupMetrics:
        arrival = request.arrival
        return self.by_group.setdefault(RequestGroup(arrival.tenant, arrival.target, arrival.priority), GroupMetrics())


_AWAKE = frozenset({Phase.CLAIMING, Phase.LOADING, Phase.READY})


@dataclass(slots=True, eq=False)
class _Line:
    members: tuple[Instance, ...]
    awake: int
    wanted_since: float = 0.0
    """While nothing of it is loaded and somebody waits: since when that is so, whoever it was who waited."""
    waiting: set[int] = field(default_factory=set)
    """Who waits, by key."""


class ColdWaitTracker:
    """One line for each target, apart for those who may leave the premises and those who may not."""

    def __init__(self, targets: Targets, metrics: RunMetrics) -> None:
        self._targets = targets
        self._metrics = metrics
        self._lines: dict[tuple[str, bool], _Line] = {}
        self._lines_of: dict[str, list[_Line]] = {}
        self._awake: dict[str, bool] = {}

    def waits(self, arrival: Arrival, now: float) -> None:
        """A request waits from now on. For durable ones there is no bound on the wait for a load."""
        if arrival.priority is Priority.DURABLE:
            return
        line = self._line(arrival)
        if not line.waiting:
            line.wanted_since = now
        line.waiting.add(arrival.key)

    def no_longer_waits(self, arrival: Arrival) -> None:
        """It runs, or is over."""
        self._line(arrival).waiting.discard(arrival.key)

    def woken(self, instance: Instance, now: float) -> None:
        """A load of it begins."""
        for line in self._lines_of.get(instance.name, ()):
            if not line.awake and line.waiting:
                self._metrics.cold_waits.append(now - line.wanted_since)

    def changed(self, instance: Instance, now: float) -> None:
        """It is in another state."""
        awake = _is_awake(instance)
        if self._awake.get(instance.name, awake) != awake:
            for line in self._lines_of.get(instance.name, ()):
                line.awake += 1 if awake else -1
                if not line.awake:
                    line.wanted_since = now
        self._awake[instance.name] = awake

    def _line(self, arrival: Arrival) -> _Line:
        key = (arrival.target, arrival.needs.allow_remote)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = self._make(arrival)
        return line

    def _make(self, arrival: Arrival) -> _Line:
        members = self._targets.members(arrival.target)
        if not arrival.needs.allow_remote:
            members = tuple(member for member in members if not member.kind.remote)
        line = _Line(members, sum(map(_is_awake, members)))
        for member in members:
            self._lines_of.setdefault(member.name, []).append(line)
            self._awake[member.name] = _is_awake(member)
        return line


def _is_awake(instance: Instance) -> bool:
    return instance.host.is_up and instance.phase in _AWAKE
