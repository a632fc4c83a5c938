"""Controls of the simulator's checks: each planted bug is found, and for what it is."""

import re

import pytest
from kit.random_scenario import check_scenario, check_seed, random_scenario
from simulation_controls import (
    CountsLineByLine,
    CountsOnUnownedMemory,
    ForcesForDurable,
    ForgetsDeadlines,
    IdlesBesideDurable,
    IgnoresFailures,
    IgnoresPoolCaps,
    IgnoresTenantCaps,
    IgnoresTheCloudGuard,
    IgnoresThePermit,
    KeepsNoShare,
    LeaksSlots,
    LeavesSlotsIdle,
    LoadsOverMemory,
    LosesRequests,
    NeverLoadsAgain,
    NeverServesLow,
    OverbooksSlots,
    PlacesTwice,
    ServesTheOldestLowerClass,
    ShedsDurable,
    Sound,
    WaitsForEveryLoad,
)

from router_svc.policy.endpoints.routes import Route
from router_svc.policy.limits import SchedulerLimits
from weft.kernel.requests.request_values import Priority
from weft_extensions.simulate.hosts import Phase, World
from weft_extensions.simulate.invariants import InvariantChecker, InvariantError
from weft_extensions.simulate.scenario import Amount, HostGroup, ModelKind, Rate, Scenario, Tenant, Traffic

SEEDS = 200
PLANTED = {
    PlacesTwice: "which runs on",
    IgnoresTenantCaps: "requests of t",
    IgnoresPoolCaps: "requests in ",
    IgnoresThePermit: "it is remote",
    IgnoresTheCloudGuard: "is placed on cloud",
    NeverServesLow: "were passed over",
    LeaksSlots: "are reported as running|slots are still taken|never over|beside a free slot",
    LosesRequests: "are reported as waiting",
    OverbooksSlots: "slots of m",
    LoadsOverMemory: "where it cannot fit",
    NeverLoadsAgain: "nothing was loaded",
    IgnoresFailures: "goes again where it broke",
    ShedsDurable: "durable request \\d+ is refused",
    KeepsNoShare: "durable requests of .* were passed over",
    ForcesForDurable: "in the place of what callers use",
    ForgetsDeadlines: "beyond its deadline|after its deadline",
    CountsOnUnownedMemory: "and nothing continues for it",
}

TRIED_FIRST = {
    IgnoresThePermit: 5,
    IgnoresTheCloudGuard: 65,
    NeverServesLow: 10,
    LoadsOverMemory: 12,
    NeverLoadsAgain: 162,
    IgnoresFailures: 3,
    ShedsDurable: 8,
    KeepsNoShare: 5,
    ForcesForDurable: 28,
    ForgetsDeadlines: 4,
    CountsOnUnownedMemory: 4,
}
"""The seed that has found a bug before; all are tried where it does not any more."""


@pytest.mark.parametrize("planted", PLANTED, ids=lambda each: each.__name__)
def test_planted_bug_is_detected_with_the_right_error(planted: type[Sound]) -> None:
    found: list[str] = []
    for seed in dict.fromkeys((TRIED_FIRST.get(planted, 0), *range(SEEDS))):
        try:
            check_seed(seed, planted)
        except InvariantError as error:
            found.append(str(error))
            if re.search(PLANTED[planted], found[-1]):
                return
    pytest.fail(f"not found in {SEEDS} seeds; instead: {found[:3]}")


def test_idle_slots_while_requests_wait_are_detected() -> None:
    """It takes a flood that lasts: a slot may be kept free for as long as a swap takes."""
    scenario = Scenario(
        name="flood",
        hosts=(HostGroup(name="h"),),
        models=(ModelKind(name="m", slots=2, loaded=True),),
        tenants=(Tenant(name="t"),),
        traffic=(
            Traffic(tenant="t", target="m", rate=Rate(per_second=2.0), output_tokens=Amount(mean=80.0, max=80.0)),
        ),
        duration_seconds=40.0,
    )
    check_scenario(scenario)
    with pytest.raises(InvariantError, match="beside a free slot"):
        check_scenario(scenario, LeavesSlotsIdle)


def test_slots_withheld_from_durable_requests_are_detected() -> None:
    scenario = rush(("m", Priority.DURABLE, 4.0), seconds=20.0)
    check_scenario(scenario)
    with pytest.raises(InvariantError, match="beside a free slot"):
        check_scenario(scenario, IdlesBesideDurable)


def rush(*shares: tuple[str, Priority, float], route: bool = False, seconds: float = 60.0) -> Scenario:
    """One model gets more of a tenant's requests than it can serve. `shares`: target, class, requests per second."""
    return Scenario(
        name="rush",
        hosts=(HostGroup(name="h"),),
        models=(ModelKind(name="m", slots=1, loaded=True),),
        tenants=(Tenant(name="t", priorities={priority: rate for _, priority, rate in shares}),),
        traffic=tuple(
            Traffic(
                tenant="t",
                target=target,
                rate=Rate(per_second=rate),
                output_tokens=Amount(mean=10.0, max=10.0),
            )
            for target, _, rate in shares
        ),
        routes={"r": Route(name="r", candidates=("m",))} if route else {},
        limits=SchedulerLimits(queue_depth_per_runner=100, overload_after_seconds=1e9),
        duration_seconds=seconds,
    )


def test_starved_queue_is_detected() -> None:
    scenario = rush(("route/r", Priority.HIGH, 20.0), ("m", Priority.NORMAL, 5.0), route=True, seconds=5.0)
    check_scenario(scenario)
    with pytest.raises(InvariantError, match=r"normal requests of m were passed over \d+ times in a row for route/r"):
        check_scenario(scenario, CountsLineByLine)


def test_class_waiting_for_the_grants_of_a_lower_class_is_detected() -> None:
    scenario = rush(("m", Priority.HIGH, 10.0), ("m", Priority.NORMAL, 10.0), ("m", Priority.LOW, 10.0), seconds=10.0)
    check_scenario(scenario)
    with pytest.raises(InvariantError, match=r"requests of m were passed over \d+ times in a row for m"):
        check_scenario(scenario, ServesTheOldestLowerClass)


def test_endless_wait_for_one_load_after_another_is_detected() -> None:
    """Two models take turns on one host, and every load restarted the queue timeout of the requests behind it."""
    names = ("m", "n")
    scenario = Scenario(
        name="turns",
        hosts=(HostGroup(name="h", memory_gib=4),),
        models=tuple(ModelKind(name=name, memory_gib=3, slots=1, load_seconds=Amount(mean=2.0)) for name in names),
        tenants=(Tenant(name="t"),),
        traffic=tuple(
            Traffic(tenant="t", target=name, rate=Rate(per_second=1.0), output_tokens=Amount(mean=40.0, max=40.0))
            for name in names
        ),
        limits=SchedulerLimits(
            queue_depth_per_runner=200,
            overload_after_seconds=1e9,
            queue_timeout_seconds=5.0,
            max_cold_wait_seconds=4.0,
            max_load_pause_seconds=10.0,
        ),
        duration_seconds=30.0,
    )
    check_scenario(scenario)
    with pytest.raises(InvariantError, match=r"request \d+ waits \d+\.\d s; the bound is 15\.0 s"):
        check_scenario(scenario, WaitsForEveryLoad)


@pytest.mark.nightly("statistics of the simulator")
def test_no_violation_is_found_on_the_same_seeds_without_a_planted_bug() -> None:
    for seed in range(SEEDS):
        check_seed(seed, Sound)


def test_found_bug_error_shows_how_to_reproduce_it() -> None:
    with pytest.raises(InvariantError, match=r"seed 0: .*check_seed\(0\)"):
        check_seed(0, LosesRequests)


def test_doubly_booked_memory_is_detected() -> None:
    scenario = next(
        scenario
        for scenario in map(random_scenario, range(SEEDS))
        if sum(model.memory_gib for model in scenario.models if not model.remote) > scenario.hosts[0].memory_gib > 0
    )
    world, checker = World(scenario), InvariantChecker(scenario)
    hosts = [host for host in world.hosts.values() if host.has_ledger]
    for host in hosts:
        checker.changed(host)
    crowded = max(hosts, key=lambda host: sum(each.kind.memory_bytes for each in host.instances) - host.total_bytes)
    for instance in crowded.instances:
        instance.phase = Phase.READY
        instance.host.program_bytes = instance.host.total_bytes
    with pytest.raises(InvariantError, match="more than it has"):
        checker.changed(crowded)
