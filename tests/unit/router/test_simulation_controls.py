"""Controls of the simulator's checks: each planted bug is found, and for what it is."""

import re

import pytest
from simulation_controls import (
    ForgetsDeadlines,
    IgnoresFailures,
    IgnoresPoolCaps,
    IgnoresTenantCaps,
    IgnoresTheCloudGuard,
    IgnoresThePermit,
    LeaksSlots,
    LeavesSlotsIdle,
    LoadsOverMemory,
    LosesRequests,
    NeverLoadsAgain,
    NeverServesLow,
    OverbooksSlots,
    PlacesTwice,
    Sound,
)

from router_svc.simulation.chance import Amount
from router_svc.simulation.checks import Auditor, InvariantError
from router_svc.simulation.hosts import Phase, World
from router_svc.simulation.random_scenario import random_scenario
from router_svc.simulation.replay import check_scenario, check_seed
from router_svc.simulation.scenario import HostGroup, ModelKind, Rate, Scenario, Tenant, Traffic

SEEDS = 200
PLANTED = {
    PlacesTwice: "which runs on",
    IgnoresTenantCaps: "requests of t",
    IgnoresPoolCaps: "requests in ",
    IgnoresThePermit: "off the premises",
    IgnoresTheCloudGuard: "is placed on cloud",
    NeverServesLow: "were passed over",
    LeaksSlots: "are said to run|slots are still taken|never over|beside a free slot",
    LosesRequests: "are said to wait",
    OverbooksSlots: "slots of m",
    LoadsOverMemory: "where it cannot fit",
    NeverLoadsAgain: "nothing was loaded",
    IgnoresFailures: "goes again where it broke",
    ForgetsDeadlines: "beyond its deadline|after its deadline",
}


@pytest.mark.parametrize("planted", PLANTED, ids=lambda each: each.__name__)
def test_a_planted_bug_is_found_for_what_it_is(planted: type[Sound]) -> None:
    found: list[str] = []
    for seed in range(SEEDS):
        try:
            check_seed(seed, planted)
        except InvariantError as error:
            found.append(str(error))
            if re.search(PLANTED[planted], found[-1]):
                return
    pytest.fail(f"not found in {SEEDS} seeds; instead: {found[:3]}")


def test_slots_that_are_left_idle_while_others_wait_are_found() -> None:
    """It takes a flood that lasts: a slot may be kept free for as long as a swap takes."""
    scenario = Scenario(
        name="flood",
        hosts=(HostGroup(name="h"),),
        models=(ModelKind(name="m", slots=2, loaded=True),),
        tenants=(Tenant(name="t"),),
        traffic=(
            Traffic(tenant="t", target="m", rate=Rate(per_second=2.0), output_tokens=Amount(mean=80.0, highest=80.0)),
        ),
        duration_seconds=120.0,
    )
    check_scenario(scenario)
    with pytest.raises(InvariantError, match="beside a free slot"):
        check_scenario(scenario, LeavesSlotsIdle)


def test_without_a_planted_bug_nothing_is_found_on_the_same_seeds() -> None:
    for seed in range(SEEDS):
        check_seed(seed, Sound)


def test_a_found_bug_says_how_to_see_it_again() -> None:
    with pytest.raises(InvariantError, match=r"seed 0: .*check_seed\(0\)"):
        check_seed(0, LosesRequests)


def test_memory_that_is_booked_twice_is_found() -> None:
    scenario = next(
        scenario
        for scenario in map(random_scenario, range(SEEDS))
        if sum(model.memory_bytes for model in scenario.models if not model.remote) > scenario.hosts[0].memory_bytes > 0
    )
    world, auditor = World(scenario), Auditor(scenario)
    hosts = [host for host in world.hosts.values() if host.has_book]
    for host in hosts:
        auditor.changed(host)
    crowded = max(hosts, key=lambda host: sum(each.kind.memory_bytes for each in host.instances) - host.total_bytes)
    for instance in crowded.instances:
        instance.phase = Phase.READY
        instance.host.program_bytes = instance.host.total_bytes
    with pytest.raises(InvariantError, match="more than it has"):
        auditor.changed(crowded)
