"""What goes wrong, at its time."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from router_svc.simulation.events import Events
from router_svc.simulation.hosts import Host, World
from router_svc.simulation.scenario import Failure, FailureMode, Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """Who carries out what is more than a number."""

    died: Callable[[Host], None]
    returned: Callable[[Host], None]


def plan_failures(scenario: Scenario, world: World, events: Events, effects: Effects) -> None:
    """Plan the beginning and the end of every failure."""
    for failure in scenario.failures:
        for host in world.named(failure.hosts):
            events.at(failure.at_seconds, partial(_begin, failure, host, effects))
            events.at(failure.at_seconds + failure.for_seconds, partial(_end, failure, host, effects))


def _begin(failure: Failure, host: Host, effects: Effects) -> None:
    match failure.mode:
        case FailureMode.DIES:
            if host.is_up:
                effects.died(host)
        case FailureMode.BREAKS:
            host.break_share = failure.share
        case FailureMode.SLOW:
            host.slowness = failure.factor


def _end(failure: Failure, host: Host, effects: Effects) -> None:
    match failure.mode:
        case FailureMode.DIES:
            if not host.is_up:
                effects.returned(host)
        case FailureMode.BREAKS:
            host.break_share = 0.0
        case FailureMode.SLOW:
            host.slowness = 1.0
