"""What random scenarios found: each as a small scenario of its own."""

import pytest
from kit.random_scenario import check_scenario, check_seed

from router_svc.simulation.scenario import (
    Amount,
    Delays,
    Failure,
    FailureMode,
    HostGroup,
    ModelKind,
    Pattern,
    Rate,
    Scenario,
    Tenant,
    Traffic,
)


def pool_with_a_dead_runner(*, loaded: bool) -> Scenario:
    """A model on three hosts. One of them is gone, and it takes a while until the router hears of it."""
    return Scenario(
        name="dead-runner",
        hosts=(HostGroup(name="h", count=3),),
        models=(ModelKind(name="m", slots=1, load_seconds=Amount(mean=4.0), loaded=loaded),),
        tenants=(Tenant(name="t"),),
        traffic=(
            Traffic(tenant="t", target="m", rate=Rate(per_second=5.0, pattern=Pattern.CONSTANT), from_seconds=2.0),
        ),
        failures=(Failure(mode=FailureMode.DIES, hosts=("h-3",), at_seconds=1.0, for_seconds=30.0),),
        delays=Delays(report_seconds=0.0, death_noticed_seconds=5.0),
        duration_seconds=10.0,
    )


def test_immediately_failing_wake_is_backed_off_while_others_wake() -> None:
    """Seeds 21, 652, 1479 and 1986: requests with another candidate to wait for did not remember the failure."""
    simulation = check_scenario(pool_with_a_dead_runner(loaded=False))
    assert simulation.metrics.total().served


def test_immediately_failing_wake_is_backed_off_while_others_are_busy() -> None:
    simulation = check_scenario(pool_with_a_dead_runner(loaded=True))
    assert simulation.metrics.total().served


@pytest.mark.parametrize("seed", [21, 62, 652, 1479, 1986])
def test_previously_failing_seed_breaks_no_rule(seed: int) -> None:
    check_seed(seed)
