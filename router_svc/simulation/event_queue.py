"""What happens when, in virtual time."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from router_svc.simulation.hosts import Host, World
from router_svc.simulation.scenario import Failure, FailureMode, Scenario

Action: TypeAlias = Callable[[], None]


class EventQueue:
    """A queue of actions by time; of two at one time the one that was planned first comes first."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the beginning."""
        self._queue: list[tuple[float, int, Action]] = []
        self._planned = 0

    def at(self, time: float, action: Action) -> None:
        """Plan an action; what lies in the past happens now."""
        self._planned += 1
        heapq.heappush(self._queue, (max(time, self.now), self._planned, action))

    def after(self, seconds: float, action: Action) -> None:
        """Plan an action for later."""
        self.at(self.now + seconds, action)

    @property
    def next_at(self) -> float | None:
        """When the next one is due; None: there is none."""
        return self._queue[0][0] if self._queue else None

    def step(self) -> None:
        """Go on to the next one and do it. There must be one."""
        time, _, action = heapq.heappop(self._queue)
        self.now = time
        action()


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureHandlers:
    """Who carries out what is more than a number."""

    died: Callable[[Host], None]
    returned: Callable[[Host], None]


def plan_failures(scenario: Scenario, world: World, events: EventQueue, effects: FailureHandlers) -> None:
    """Plan the beginning and the end of every failure."""
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
