"""Metrics of a run: counters by tenant, target and priority class, and waits for cold models."""

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from router_svc.policy.estimates import estimate_error
from router_svc.policy.router_request import Request
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Priority
from weft_extensions.simulate.hosts import Instance, Phase, Targets
from weft_extensions.simulate.scenario import Scenario
from weft_extensions.simulate.traffic import SimulatedRequest


@dataclass(frozen=True, slots=True)
class RequestGroup:
    """A group of requests in the metrics."""

    tenant: str
    target: str
    band: Priority


@dataclass(slots=True, kw_only=True)
class GroupMetrics:
    """Counters of a group."""

    requests: int = 0
    served: int = 0
    waits: "array[float]" = field(default_factory=lambda: array("d"))
    """Served requests: seconds from arrival to the grant of the successful attempt."""
    refusals: Counter[Reason] = field(default_factory=Counter)
    refusal_waits: "array[float]" = field(default_factory=lambda: array("d"))
    """Other requests: seconds from arrival to refusal or failure."""
    first_tokens: "array[float]" = field(default_factory=lambda: array("d"))
    """Served requests: seconds from arrival to the first content."""
    prompt_tokens: int = 0
    """Of served requests ..."""
    cached_tokens: int = 0
    """... and how many of them were cached."""
    offered_cost: float = 0.0
    """Requested prompt and output tokens; accelerator seconds if the scenario has media."""
    served_cost: float = 0.0
    """Uncached prompt tokens and output tokens, or seconds, served within the scenario's duration."""
    good_tokens: int = 0
    """Output tokens of requests served in time."""

    def add(self, other: "GroupMetrics") -> None:
        """Adds the counters of another group."""
        self.requests += other.requests
        self.served += other.served
        self.waits.extend(other.waits)
        self.first_tokens.extend(other.first_tokens)
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.refusals.update(other.refusals)
        self.refusal_waits.extend(other.refusal_waits)
        self.offered_cost += other.offered_cost
        self.served_cost += other.served_cost
        self.good_tokens += other.good_tokens


@dataclass(frozen=True, slots=True)
class Waits:
    """Percentiles of waits, in seconds."""

    p50: float
    p95: float
    p99: float
    longest: float

    @staticmethod
    def of(values: Iterable[float]) -> "Waits | None":
        """Returns the percentiles; None: there are no values."""
        ordered = sorted(values)
        if not ordered:
            return None
        last = len(ordered) - 1
        return Waits(*(ordered[round(last * share)] for share in (0.5, 0.95, 0.99, 1.0)))


class RunMetrics:
    """All metrics of a run."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._horizon_seconds = scenario.duration_seconds
        self._has_media = any(kind.is_media for kind in scenario.models)
        self.by_group: dict[RequestGroup, GroupMetrics] = {}
        self.cold_waits = array("d")
        """Seconds that requests waited for a target with nothing loaded, until a load began."""
        self.estimate_errors = array("d")
        """Seconds between the first estimate of a request's start and its actual start."""
        self.estimate_error_shares = array("d")
        """The same as shares of the wait after the estimate; see `estimate_error`."""
        self.requests = 0
        self.attempts = 0
        self.first_attempts = 0
        self.attempts_in_outage = 0
        """Attempts on hosts while they were failing."""
        self.first_attempts_in_outage = 0

    def started(self, estimated_seconds: float, waited_seconds: float) -> None:
        """Counts the start of a request, with an estimate made `waited_seconds` before."""
        self.estimate_errors.append(abs(waited_seconds - estimated_seconds))
        self.estimate_error_shares.append(estimate_error(estimated_seconds, waited_seconds))

    def arrived(self, request: SimulatedRequest) -> None:
        """Counts an arrival."""
        self.requests += 1
        tally = self._tally(request)
        tally.requests += 1
        tally.offered_cost += self._cost(request, 0)

    def attempted(self, number: int, *, host_is_failing: bool) -> None:
        """Counts the n-th attempt of a request."""
        is_first = number == 1
        self.attempts += 1
        self.first_attempts += is_first
        self.attempts_in_outage += host_is_failing
        self.first_attempts_in_outage += is_first and host_is_failing

    def served(
        self,
        request: SimulatedRequest,
        *,
        waited_seconds: float,
        first_token_seconds: float,
        cached_tokens: int,
        now: float,
    ) -> None:
        """Counts a request that was served in time."""
        tally = self._tally(request)
        tally.served += 1
        tally.waits.append(waited_seconds)
        tally.first_tokens.append(first_token_seconds)
        tally.prompt_tokens += request.arrival.spec.prompt_tokens
        tally.cached_tokens += cached_tokens
        tally.good_tokens += request.output_tokens
        if now <= self._horizon_seconds:
            tally.served_cost += self._cost(request, cached_tokens)

    def _cost(self, request: SimulatedRequest, cached_tokens: int) -> float:
        """Returns tokens, or device time if the scenario compares tokens and media."""
        fresh_tokens = request.arrival.spec.prompt_tokens - cached_tokens
        if not self._has_media:
            return fresh_tokens + request.output_tokens
        kind = self._scenario.kind_of(request.arrival.spec.model)
        assert kind is not None, "targets of a scenario are known"
        seconds = kind.prefill_seconds(fresh_tokens) + kind.answer_seconds(
            request.output_tokens, request.arrival.spec.work
        )
        return seconds / kind.slots

    def lost(self, request: SimulatedRequest, reason: Reason, now: float) -> None:
        """Counts a request that was refused or failed."""
        tally = self._tally(request)
        tally.refusals[reason] += 1
        tally.refusal_waits.append(now - request.arrival.arrived_at)

    def total(self, only: Iterable[RequestGroup] | None = None) -> GroupMetrics:
        """Returns the sum of the given groups; default: all."""
        total = GroupMetrics()
        for who in self.by_group if only is None else only:
            total.add(self.by_group[who])
        return total

    def _tally(self, request: SimulatedRequest) -> GroupMetrics:
        arrival = request.arrival
        return self.by_group.setdefault(
            RequestGroup(arrival.spec.tenant, arrival.spec.model, arrival.spec.priority), GroupMetrics()
        )


_AWAKE = frozenset({Phase.CLAIMING, Phase.LOADING, Phase.READY})


@dataclass(slots=True, eq=False)
class _ColdQueue:
    members: tuple[Instance, ...]
    awake: int
    wanted_since: float = 0.0
    """Since when requests wait while nothing of it is loaded."""
    waiting: set[int] = field(default_factory=set)


class ColdWaitTracker:
    """Measures waits for cold targets, separately for requests that allow remote models."""

    def __init__(self, targets: Targets, metrics: RunMetrics) -> None:
        self._targets = targets
        self._metrics = metrics
        self._queues: dict[tuple[str, bool], _ColdQueue] = {}
        self._queues_of: dict[str, list[_ColdQueue]] = {}
        self._awake: dict[str, bool] = {}

    def waits(self, arrival: Request, now: float) -> None:
        """Adds a waiting request. Durable ones are not measured, as their wait for a load has no bound."""
        if arrival.spec.priority is Priority.DURABLE:
            return
        queue = self._queue(arrival)
        if not queue.waiting:
            queue.wanted_since = now
        queue.waiting.add(arrival.key)

    def no_longer_waits(self, arrival: Request) -> None:
        """Removes a request that runs or has ended."""
        self._queue(arrival).waiting.discard(arrival.key)

    def woken(self, instance: Instance, now: float) -> None:
        """Records the waits that end with a load of this instance."""
        for queue in self._queues_of.get(instance.name, ()):
            if not queue.awake and queue.waiting:
                self._metrics.cold_waits.append(now - queue.wanted_since)

    def changed(self, instance: Instance, now: float) -> None:
        """Records a state change of an instance."""
        awake = _is_awake(instance)
        if self._awake.get(instance.name, awake) != awake:
            for queue in self._queues_of.get(instance.name, ()):
                queue.awake += 1 if awake else -1
                if not queue.awake:
                    queue.wanted_since = now
        self._awake[instance.name] = awake

    def _queue(self, arrival: Request) -> _ColdQueue:
        key = (arrival.spec.model, arrival.needs.allow_remote)
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = self._make(arrival)
        return queue

    def _make(self, arrival: Request) -> _ColdQueue:
        members = self._targets.members(arrival.spec.model)
        if not arrival.needs.allow_remote:
            members = tuple(member for member in members if not member.kind.remote)
        queue = _ColdQueue(members, sum(map(_is_awake, members)))
        for member in members:
            self._queues_of.setdefault(member.name, []).append(queue)
            self._awake[member.name] = _is_awake(member)
        return queue


def _is_awake(instance: Instance) -> bool:
    return instance.host.is_up and instance.phase in _AWAKE
