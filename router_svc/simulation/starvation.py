"""How long nobody may be passed over: bounds on waiting for a load, beside a free slot, and behind higher bands.

The bounds are worked out from the scenario, generously: a run that exceeds one starves somebody.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil, inf
from typing import Protocol

from router_svc.policy.arrival import ROUTE_PREFIX, Arrival, Needs
from router_svc.policy.endpoints.candidates import Candidate, Readiness
from router_svc.policy.endpoints.cluster_view import MeshChange
from router_svc.policy.limits import SchedulerLimits
from router_svc.simulation.hosts import HOLDS_MEMORY, Instance, Targets, World, lacks
from router_svc.simulation.scenario import FailureMode, Scenario
from weft.kernel.request import Priority

SLACK_SECONDS = 3.0
"""For reports, ticks, and looks at the book of memory."""
SLACK_GRANTS = 2


class Waiter(Protocol):
    """A request that waits."""

    attempts: int

    @property
    def arrival(self) -> Arrival:
        """What the scheduler knows of it."""
        ...


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests that can stand in for each other."""

    line: str
    needs: Needs


class StarvationDetector:
    """Remembers since when somebody is passed over."""

    def __init__(self, scenario: Scenario, targets: Targets) -> None:
        self._scenario = scenario
        self._targets = targets
        self._told: dict[str, Candidate] = {}
        self._pool_of = {instance.name: instance.kind.name for instance in World(scenario)}
        self._lines = len(set(self._pool_of.values())) + len(scenario.routes)
        self._turn_seconds = longest_turn(scenario)
        self._cold_since: dict[Kind, float] = {}
        self._beside_since: dict[Kind, float] = {}
        self._passed_over: dict[tuple[str, Priority], tuple[frozenset[int], int]] = {}
        """By line and band: who was passed over last, and how often in a row."""
        self._passed_over_for: dict[tuple[str, Priority], tuple[frozenset[int], int]] = {}
        """The same for other lines."""
        self._reported_at: dict[str, float] = {}
        self._booked_at = 0.0

    def mesh_changed(self, change: MeshChange, now: float) -> None:
        """The scheduler hears this."""
        for candidate in change.candidates:
            self._told[candidate.model] = candidate
            self._reported_at[candidate.host] = now
        if change.hosts is not None:
            self._booked_at = now
        if any(candidate.readiness is Readiness.DOWN for candidate in change.candidates):
            self._cold_since.clear()

    def book_is_fresh(self, host: str, now: float) -> bool:
        """Whether the book was seen after the last report from this host."""
        return self._reported_at.get(host, 0.0) < self._booked_at <= now

    def woken(self, candidate: Candidate) -> None:
        """A load begins: whoever waited for that has waited enough."""
        for kind in tuple(self._cold_since):
            if any(member.name == candidate.model for member in self._targets.members(kind.line)):
                del self._cold_since[kind]

    def overtaken(self, placed: Arrival, candidate: Candidate, passed_by: Sequence[Arrival], now: float) -> str | None:
        """Whether lower bands were passed over too often with this grant, in words.

        `passed_by`: those who wait, in all lines, and may run, were it there or elsewhere.
        """
        own, band, limits = self._line(placed), placed.priority, self._scenario.limits
        self._passed_over.pop((own, band), None)
        self._passed_over_for.pop((own, band), None)
        wanted: dict[Kind, bool] = {}
        below: dict[tuple[str, Priority], list[Arrival]] = {(own, lower): [] for lower in Priority if lower > band}
        for each in passed_by:
            kind = Kind(self._line(each), each.needs)
            if kind not in wanted:
                wanted[kind] = self._could_take(candidate, kind)
            if each.priority > band and wanted[kind]:
                below.setdefault((kind.line, each.priority), []).append(each)
        for (line, lower), waiting in below.items():
            every = _turn_every(lower, limits)
            counts, most = self._passed_over, every + SLACK_GRANTS
            if line != own:
                counts, most = self._passed_over_for, every * self._lines + SLACK_GRANTS
            count = self._count(counts, (line, lower), waiting, now)
            if count > most:
                return f"{lower.name.lower()} requests of {line} were passed over {count} times in a row for {own}"
        return None

    def _count(
        self,
        counts: dict[tuple[str, Priority], tuple[frozenset[int], int]],
        key: tuple[str, Priority],
        waiting: Sequence[Arrival],
        now: float,
    ) -> int:
        """How often in a row these were passed over, this time included. Those who came later have not been yet."""
        _, band = key
        # The share of durable requests is counted from their first moment on.
        long_seconds = 0.0 if band is Priority.DURABLE else self._scenario.limits.lower_band_patience_seconds
        is_long = _all_waited(waiting, now, long_seconds)
        patient = frozenset(each.key for each in waiting) if is_long else frozenset[int]()
        before, count = counts.get(key, (frozenset[int](), 0))
        count = (count + 1 if patient & before else 1) if patient else 0
        counts[key] = (patient, count)
        return count

    def impatience(self, waiters: Sequence[Waiter], free: Sequence[Candidate], world: World, now: float) -> str | None:
        """Who has waited too long for a load, or beside a free slot, in words; None: nobody."""
        fresh = [waiter.arrival for waiter in waiters if not waiter.attempts]
        kinds = {Kind(self._line(arrival), arrival.needs) for arrival in fresh}
        # Nobody gives way for durable requests at any time.
        bound = {Kind(self._line(each), each.needs) for each in fresh if each.priority is not Priority.DURABLE}
        return self._starved_cold(bound, world, now) or self._starved_beside(kinds, free, now)

    def _starved_cold(self, kinds: Collection[Kind], world: World, now: float) -> str | None:
        cold = {kind for kind in kinds if self._is_cold(kind, world)}
        self._cold_since = {kind: self._cold_since.get(kind, now) for kind in cold}
        for kind, since in self._cold_since.items():
            bound = self._cold_bound(kind)
            if now - since > bound:
                return f"nothing was loaded for {kind.line} for {now - since:.1f} s; the bound is {bound:.1f} s"
        return None

    def _starved_beside(self, kinds: Collection[Kind], free: Sequence[Candidate], now: float) -> str | None:
        if self._scenario.failures:
            # What broke is left alone for a while, and its slots are free meanwhile.
            return None
        beside = {kind for kind in kinds if any(self._could_take(candidate, kind) for candidate in free)}
        self._beside_since = {kind: self._beside_since.get(kind, now) for kind in beside}
        for kind, since in self._beside_since.items():
            if now - since > self._turn_seconds:
                return f"requests for {kind.line} waited {now - since:.1f} s beside a free slot"
        return None

    def _could_take(self, candidate: Candidate, kind: Kind) -> bool:
        members = self._targets.members(kind.line)
        route = self._scenario.routes.get(kind.line.removeprefix(ROUTE_PREFIX))
        if kind.line.startswith(ROUTE_PREFIX) and route is not None and route.pin_primary:
            members = tuple(each for each in members if route.candidates[0] in (each.name, each.kind.name))
        return not lacks(candidate, kind.needs) and any(member.name == candidate.model for member in members)

    def _is_cold(self, kind: Kind, world: World) -> bool:
        """Whether it waits for a load that could begin: none of its members is loaded or loads, and one would fit."""
        members = [
            world.instances[member.name]
            for member in self._targets.members(kind.line)
            if member.name in self._told and not lacks(self._told[member.name], kind.needs)
        ]
        states = {self._told[member.name].readiness for member in members}
        if not states or states & {Readiness.READY, Readiness.LOADING}:
            return False
        return any(self._told[member.name].readiness is Readiness.ASLEEP and _could_fit(member) for member in members)

    def _cold_bound(self, kind: Kind) -> float:
        rivals = max(len(member.host.instances) for member in self._targets.members(kind.line))
        limits = self._scenario.limits
        return limits.max_cold_wait_seconds + 2 * limits.memory_retry_seconds + rivals * self._turn_seconds

    def _line(self, arrival: Arrival) -> str:
        return self._pool_of.get(arrival.target, arrival.target)


def cold_wait_bound(scenario: Scenario, world: World) -> float:
    """Longest wait for a load on any host, in seconds: the scheduler's own bound, and a turn of each rival."""
    rivals = max((len(host.instances) - 1 for host in world.hosts.values()), default=0)
    return scenario.limits.max_cold_wait_seconds + rivals * longest_turn(scenario)


def _could_fit(instance: Instance) -> bool:
    host = instance.host
    pinned = [other for other in host.instances if other.kind.pinned and other.phase in HOLDS_MEMORY]
    room = host.total_bytes - host.program_bytes - host.unowned_bytes - sum(other.kind.memory_bytes for other in pinned)
    return host.is_up and (not host.has_ledger or instance.kind.memory_bytes <= room)


def _turn_every(band: Priority, limits: SchedulerLimits) -> float:
    """Of so many grants one goes to this band, while others are in higher ones. Infinite: none at all."""
    if band is not Priority.DURABLE:
        return limits.lower_band_every
    return ceil(1.0 / limits.durable_share) if limits.durable_share else inf


def _all_waited(waiting: Sequence[Arrival], now: float, long_seconds: float) -> bool:
    """Whether there are any, and whoever of them may be the first has waited for long."""
    by_tenant = sorted(waiting, key=lambda each: each.tenant)
    firsts = [min(group, key=_place) for _, group in groupby(by_tenant, key=lambda each: each.tenant)]
    return bool(firsts) and all(now - first.arrived_at > long_seconds for first in firsts)


def _place(arrival: Arrival) -> tuple[float, float, int]:
    deadline_at = float("inf") if arrival.deadline_at is None else arrival.deadline_at
    return (deadline_at, arrival.arrived_at, arrival.key)


def longest_turn(scenario: Scenario) -> float:
    """The end of what runs, the way out of what gives way, a load, and the turn of what was loaded."""
    slowest = max([1.0, *(each.factor for each in scenario.failures if each.mode is FailureMode.SLOW)])
    prompt = max(traffic.prompt_tokens.largest_likely for traffic in scenario.traffic)
    output = max(traffic.output_tokens.largest_likely for traffic in scenario.traffic)
    serve = max(
        prompt / kind.prefill_tokens_per_second + output / kind.decode_tokens_per_second for kind in scenario.models
    )
    load = slowest * max(kind.load_seconds.largest_likely for kind in scenario.models)
    limits, delays = scenario.limits, scenario.delays
    turn = max(limits.min_turn_seconds, min(limits.swap_quantum_ratio * load, limits.max_cold_wait_seconds))
    news = delays.unload_seconds + delays.memory_watch_seconds + 4 * delays.report_seconds
    return slowest * serve + load + turn + news + SLACK_SECONDS
