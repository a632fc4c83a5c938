"""Schedulers with a planted bug each: the checks of the simulator must find every one of them."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from router_svc.policy.decisions import Decision, Placed, Served, WakeFailure, Wakes
from router_svc.policy.endpoints.cluster_view import MeshChange
from router_svc.policy.loading.cold_start_plan import Demand, Resident
from router_svc.policy.loading.swap_cost import SwapCosts
from router_svc.policy.pool_settings import Settings
from router_svc.policy.queue.queue import Queue, QueueEntry
from router_svc.policy.router_request import Request
from router_svc.policy.scheduler import Scheduler
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Priority
from weft_extensions.simulate.scenario import Scenario


class Sound:
    """No bug: what the controls are compared with."""

    def __init__(self, scenario: Scenario, **limits: Any) -> None:
        self.inner = Scheduler(replace(scenario.limits, **limits), self.settings(scenario))

    def settings(self, scenario: Scenario) -> Settings:
        return scenario.settings

    @property
    def waiting(self) -> int:
        return self.inner.waiting

    @property
    def running(self) -> int:
        return self.inner.running

    def apply(self, change: MeshChange, now: float) -> list[Decision]:
        return self.heard(self.inner.apply(change, now))

    def submit(self, arrival: Request, now: float) -> list[Decision]:
        return self.heard(self.inner.submit(arrival, now))

    def report_first_content(self, key: int, now: float) -> list[Decision]:
        return self.heard(self.inner.report_first_content(key, now))

    def report_failed(self, key: int, attempt: int, reason: Reason, now: float) -> list[Decision]:
        return self.heard(self.inner.report_failed(key, attempt, reason, now))

    def finish(
        self, key: int, now: float, served: Served | None = None, failure: Reason | None = None
    ) -> list[Decision]:
        return self.heard(self.inner.finish(key, now, served, failure))

    def wake_finished(
        self, model: str, failure: WakeFailure | None, now: float, *, self_reported: bool = False
    ) -> list[Decision]:
        return self.heard(self.inner.wake_finished(model, failure, now, self_reported=self_reported))

    def opens_at(self, now: float) -> float | None:
        return self.inner.opens_at(now)

    def proceed(self, now: float) -> list[Decision]:
        return self.heard(self.inner.proceed(now))

    def tick(self, now: float) -> list[Decision]:
        return self.heard(self.inner.tick(now))

    def heard(self, decisions: list[Decision]) -> list[Decision]:
        return decisions


class PlacesTwice(Sound):
    """Every tenth grant is given again."""

    placed = 0

    def heard(self, decisions: list[Decision]) -> list[Decision]:
        repeated: list[Decision] = []
        for decision in decisions:
            repeated.append(decision)
            if isinstance(decision, Placed):
                self.placed += 1
                repeated += [decision] * (self.placed % 10 == 0)
        return repeated


class IgnoresTenantCaps(Sound):
    def settings(self, scenario: Scenario) -> Settings:
        uncapped = {name: replace(each, max_in_flight=0) for name, each in scenario.settings.tenants.items()}
        return replace(scenario.settings, tenants=uncapped)


class IgnoresPoolCaps(Sound):
    def settings(self, scenario: Scenario) -> Settings:
        uncapped = {name: replace(each, max_in_flight=0) for name, each in scenario.settings.pools.items()}
        return replace(scenario.settings, pools=uncapped)


class IgnoresThePermit(Sound):
    """Whatever a request says, it may leave the premises."""

    def submit(self, arrival: Request, now: float) -> list[Decision]:
        return super().submit(replace(arrival, needs=replace(arrival.needs, allow_remote=True)), now)


class IgnoresTheCloudGuard(Sound):
    def apply(self, change: MeshChange, now: float) -> list[Decision]:
        return super().apply(replace(change, cloud_fallback=True), now)


class NeverServesLow(Sound):
    """Lower bands get nothing while there is anything above them."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario, lower_class_patience_seconds=1e9)


class CountsLineByLine(Sound):
    """A request that waits in one queue is never passed over by one of another queue."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.inner._note_passed_over = lambda *_: None  # type: ignore[method-assign]  # the planted bug


class ShedsDurable(Sound):
    """Durable requests are treated like those of the lowest priority class of callers."""

    def submit(self, arrival: Request, now: float) -> list[Decision]:
        is_durable = arrival.spec.priority is Priority.DURABLE
        return super().submit(
            replace(arrival, spec=replace(arrival.spec, priority=Priority.LOW)) if is_durable else arrival, now
        )


class KeepsNoShare(Sound):
    """Durable requests get only what no caller wants."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario, durable_share=0.0)


class ForcesForDurable(Sound):
    """Models that callers use are evicted for durable requests."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        planner = self.inner._loads._planner
        planner._costs = YieldsAlways(planner._costs.limits, planner._costs.estimates)


class YieldsAlways(SwapCosts):
    def may_be_evicted_for(self, demand: Demand, resident: Resident, now: float) -> bool:
        return True


class IdlesBesideDurable(Sound):
    """Durable requests get their share, and never what is free."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        for kind in scenario.models:
            line = self.inner._queues.open(kind.name)
            line.keeps_waiting = _everybody_waits  # type: ignore[method-assign]  # the planted bug
            line.entries = partial(_only_due, line.entries)  # type: ignore[method-assign]  # the planted bug


def _everybody_waits(priority: Priority) -> bool:
    return priority in Priority


def _only_due(entries: Any, *asked: Any) -> Iterator[QueueEntry]:
    return (each for each in entries(*asked) if each.priority is not Priority.DURABLE or each.rank[0] < 0)


class ServesTheOldestLowerClass(Sound):
    """A grant to any lower class of a tenant counts for all of them."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        for kind in scenario.models:
            line = self.inner._queues.open(kind.name)
            overdue = partial(_oldest_first, line, line._overdue_classes)
            line._overdue_classes = overdue  # type: ignore[method-assign]  # the planted bug


def _oldest_first(line: Queue, overdue: Any, *asked: Any) -> Iterator[QueueEntry]:
    found = list(overdue(*asked))
    if found:
        first = min(found, key=lambda each: each.rank[4])
        for each in found:
            line._backlogs[each.priority][each.head.tenant].passed_over = 0.0
        yield first


class LeaksSlots(Sound):
    """Every seventh end is not noticed."""

    def finish(
        self, key: int, now: float, served: Served | None = None, failure: Reason | None = None
    ) -> list[Decision]:
        return [] if key % 7 == 0 else super().finish(key, now, served, failure)


class LosesRequests(Sound):
    """Every seventh request is taken and never heard of again."""

    def submit(self, arrival: Request, now: float) -> list[Decision]:
        return [] if arrival.key % 7 == 0 else super().submit(arrival, now)


class OverbooksSlots(Sound):
    """Every model is reported with one slot more than it has."""

    def apply(self, change: MeshChange, now: float) -> list[Decision]:
        roomy = tuple(replace(candidate, slots=candidate.slots + 1) for candidate in change.candidates)
        return super().apply(replace(change, candidates=roomy), now)


class LoadsOverMemory(Sound):
    """All memory of every host counts as free."""

    def apply(self, change: MeshChange, now: float) -> list[Decision]:
        if change.hosts is not None:
            empty = {name: replace(host, free_bytes=host.total_bytes) for name, host in change.hosts.items()}
            change = replace(change, hosts=empty)
        return super().apply(change, now)


class NeverLoadsAgain(Sound):
    """After three loads there is no further one."""

    loads = 0

    def heard(self, decisions: list[Decision]) -> list[Decision]:
        kept: list[Decision] = []
        for decision in decisions:
            self.loads += isinstance(decision, Wakes)
            if not isinstance(decision, Wakes) or self.loads <= 3:
                kept.append(decision)
        return kept


class IgnoresFailures(Sound):
    """Who broke is tried again: a failure counts as a bounce."""

    def report_failed(self, key: int, attempt: int, reason: Reason, now: float) -> list[Decision]:
        return super().report_failed(key, attempt, Reason.BACKEND_NOT_READY, now)


class ForgetsDeadlines(Sound):
    def submit(self, arrival: Request, now: float) -> list[Decision]:
        return super().submit(replace(arrival, own_deadline_at=None), now)


class LeavesSlotsIdle(Sound):
    """Every model is reported with one slot."""

    def apply(self, change: MeshChange, now: float) -> list[Decision]:
        narrow = tuple(replace(candidate, slots=1) for candidate in change.candidates)
        return super().apply(replace(change, candidates=narrow), now)


class WaitsForEveryLoad(Sound):
    """The queue timeout starts again with every load, however many there are."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario, max_load_pause_seconds=1e9)


class CountsOnUnownedMemory(Sound):
    """What a model holds that is not in the mesh any more is taken for a load that will be over soon."""

    def apply(self, change: MeshChange, now: float) -> list[Decision]:
        if change.hosts is not None:
            owned = {
                name: replace(host, holders=tuple(replace(each, unowned=False) for each in host.holders))
                for name, host in change.hosts.items()
            }
            change = replace(change, hosts=owned)
        return super().apply(change, now)
