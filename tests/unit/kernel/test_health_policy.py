"""The policy of health: how observations change what is reported, in which time, and how often at most."""

import random
from itertools import pairwise

import pytest

from weft.kernel.services.health import (
    EVENT_LOOP,
    WELL,
    Component,
    HealthLimits,
    HealthReport,
    HealthState,
    Observation,
    degraded,
    down,
    next_component,
)

LIMITS = HealthLimits()
AWAY, SLOW = down("no_router", "no router answers"), degraded("old_fleet_view", "the last view is used")
FRESH = Component(name="router", since=0.0)
RUNNING = Component(name="router", state=HealthState.OK, reason="", message="", since=0.0, was_healthy=True)


def observed(component: Component, *seen: Observation, begin: float = 100.0, step: float = 1.0) -> list[Component]:
    """The component after each of these observations, one each `step`."""
    states = []
    for number, observation in enumerate(seen):
        component = next_component(component, observation, begin + number * step, LIMITS)
        states.append(component)
    return states


def max_transitions(seconds: float) -> int:
    """The highest number of changes of one component that fit into this time, whatever is observed.

    With three severities there are at most two changes for the worse before one for the better. The first two after
    the start of a process may come at once.
    """
    return 2 + 3 * (int(seconds / (2 * LIMITS.worse_after_seconds + LIMITS.better_after_seconds)) + 1)


def transitions(states: list[Component], first: HealthState) -> int:
    before = [first, *(each.state for each in states)]
    return sum(one is not other for one, other in pairwise(before))


def test_component_that_passes_its_first_check_is_healthy_immediately() -> None:
    assert observed(FRESH, WELL)[-1].state is HealthState.OK
    assert observed(FRESH, SLOW, WELL)[-1].state is HealthState.OK


def test_component_that_never_worked_is_starting_until_it_is_down() -> None:
    states = observed(FRESH, *[AWAY] * 3)
    assert [each.state for each in states] == [HealthState.STARTING, HealthState.STARTING, HealthState.DOWN]
    assert states[0].reason == "no_router", "what it waits for is said from the beginning"
    assert observed(states[-1], WELL)[-1].state is HealthState.OK


def test_fault_is_reported_after_its_number_of_checks_and_its_time() -> None:
    states = observed(RUNNING, *[AWAY] * 3)
    assert [each.state for each in states] == [HealthState.OK, HealthState.OK, HealthState.DOWN]
    assert (states[-1].reason, states[-1].since) == ("no_router", 102.0)
    quick = observed(RUNNING, *[AWAY] * 10, step=0.1)
    assert {each.state for each in quick} == {HealthState.OK}, "ten looks within a second are not long enough"
    assert observed(RUNNING, AWAY, AWAY, step=60.0)[-1].state is HealthState.OK, "two looks are not often enough"


def test_recovery_takes_longer_than_a_fault() -> None:
    broken = observed(RUNNING, *[AWAY] * 3)[-1]
    states = observed(broken, *[WELL] * 11, begin=200.0)
    assert {each.state for each in states[:-1]} == {HealthState.DOWN}
    assert (states[-1].state, states[-1].since) == (HealthState.OK, 210.0)


def test_one_failed_check_restarts_the_recovery_time() -> None:
    broken = observed(RUNNING, *[AWAY] * 3)[-1]
    states = observed(broken, *[WELL] * 9, AWAY, *[WELL] * 10, begin=200.0)
    assert {each.state for each in states} == {HealthState.DOWN}


def test_changing_fault_keeps_its_start_time_and_gets_its_new_reason() -> None:
    broken = observed(RUNNING, *[AWAY] * 3)[-1]
    other = observed(broken, down("no_answer", "its check has had no answer"), begin=200.0)[-1]
    assert (other.state, other.reason, other.since) == (HealthState.DOWN, "no_answer", 102.0)


@pytest.mark.parametrize("period", [1, 2, 3, 5, 8, 13, 21])
def test_flapping_fault_changes_the_state_no_more_often_than_the_bound(period: int) -> None:
    seconds = 1_000
    seen = [AWAY if (number // period) % 2 else WELL for number in range(seconds)]
    assert transitions(observed(RUNNING, *seen), HealthState.OK) <= max_transitions(seconds)
    if period <= 2:
        assert transitions(observed(RUNNING, *seen), HealthState.OK) == 0, "too short to be a fault"
    if period == 5:
        assert transitions(observed(RUNNING, *seen), HealthState.OK) == 1, "too short to be a recovery"


@pytest.mark.parametrize("seed", range(20))
def test_no_order_of_observations_changes_the_state_more_often_than_the_bound(seed: int) -> None:
    chance = random.Random(seed)
    seen: list[Observation] = []
    while len(seen) < 500:
        seen += [chance.choice((WELL, SLOW, AWAY))] * chance.randint(1, 15)
    assert transitions(observed(FRESH, *seen), HealthState.STARTING) <= max_transitions(len(seen))


def component(name: str, state: HealthState) -> Component:
    return Component(name=name, state=state, since=0.0)


def test_only_an_essential_component_that_is_down_makes_a_process_unready() -> None:
    store, engines = component("store", HealthState.DOWN), component("engines", HealthState.DOWN)
    assert not HealthReport(components=(store,), essential=frozenset({"store"})).is_ready
    report = HealthReport(components=(engines,), stopped_services=frozenset({"tasks"}))
    assert (report.is_ready, report.status) == (True, "degraded")
    assert (report.serves("tasks"), report.serves("placement")) == (False, True)


def test_process_is_alive_regardless_of_its_dependencies() -> None:
    broken = component("store", HealthState.DOWN)
    assert HealthReport(components=(broken,), essential=frozenset({"store"})).is_live
    assert not HealthReport(components=(component(EVENT_LOOP, HealthState.DOWN),)).is_live


def test_process_status_has_five_values() -> None:
    essential = frozenset({"store"})
    words = [HealthReport(components=(component("store", state),), essential=essential).status for state in HealthState]
    assert words == ["ok", "degraded", "starting", "not_ready"]
    assert HealthReport(is_stopping=True).status == "stopping"
