"""The event queue of virtual time, and the failures of a scenario as events on it."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from router_svc.simulation.hosts import Host, World
from router_svc.simulation.scenario import Failure, FailureMode, Scenario

Action: TypeAlias = Callable[[], None]


class EventQueue:
    """A queue of actions by time; actions of the same time run in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        """Virtual time: seconds since the beginning."""
        self._queue: list[tuple[float, int, Action]] = []
        self._planned = 0

    def at(self, time: float, action: Action) -> None:
        """Plans an action; one in the past happens now."""
        self._planned += 1
        heapq.heappush(self._queue, (max(time, self.now), self._planned, action))

    def after(self, seconds: float, action: Action) -> None:
        """Plans an action after a delay."""
        self.at(self.now + seconds, action)

    @property
    def next_at(self) -> float | None:
        """When the next action is due; None: there is none."""
        return self._queue[0][0] if self._queue else None

    def step(self) -> None:
        """Advances to the next action and runs it. There must be one."""
        time, _, action = heapq.heappop(self._queue)
        self.now = time
        action()


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureHandlers:
    """Callbacks for the death and the return of a host."""

    died: Callable[[Host], None]
    returned: Callable[[Host], None]


def plan_failures(scenario: Scenario, world: World, events: EventQueue, effects: FailureHandlers) -> None:
    """Plans the begin and the end of every failure."""
    for failure in scenario.failures:
        for host in world.named(failure.hosts):
            events.at(failure.at_seconds, partial(_begin, failure, host, effects))
            events.at(failure.at_seconds + failure.for_seconds, partial(_end, failure, host, effects))


def _begin(failure: Failure, host: Host, effects: FailureHandlers) -> None:
    match failure.mode:
        case FailureMode.DIES:
            if host.is_up:
                effects.died(host)
        case FailureMode.BREAKS:
            host.break_share = failure.share
        case FailureMode.SLOW:
            host.slowness = failure.factor


def _end(failure: Failure, host: Host, effects: FailureHandlers) -> None:
    match failure.mode:
        case FailureMode.DIES:
            if not host.is_up:
                effects.returned(host)
        case FailureMode.BREAKS:
            host.break_share = 0.0
        case FailureMode.SLOW:
            host.slowness = 1.0
