"""Durable requests in the background, in virtual time: what callers notice of them, and what they get."""

import pytest
from kit.random_scenario import real_scheduler

from router_svc.policy.limits import SchedulerLimits
from weft.kernel.requests.request_values import Priority
from weft_extensions.simulate.engine import Simulation
from weft_extensions.simulate.metrics import GroupMetrics, Waits
from weft_extensions.simulate.scenario import Amount, HostGroup, ModelKind, Rate, Scenario, Tenant, Traffic

STATISTICS = pytest.mark.nightly("statistics of the simulator")
SECONDS = pytest.mark.parametrize("seconds", [40.0, pytest.param(200.0, marks=STATISTICS)])
ANSWER = Amount(mean=40.0, variation=0.3, max=80.0)
"""A second or two of one of eight slots."""


def mesh(seconds: float, *, callers_per_second: float, durable_per_second: float = 0.0) -> Scenario:
    """One model, which answers about eight requests in a second."""
    streams = [("caller", callers_per_second), ("nightly", durable_per_second)]
    return Scenario(
        name="background",
        hosts=(HostGroup(name="h"),),
        models=(ModelKind(name="m", slots=8, loaded=True),),
        tenants=(Tenant(name="caller"), Tenant(name="nightly", priorities={Priority.DURABLE: 1.0})),
        traffic=tuple(
            Traffic(
                tenant=tenant,
                target="m",
                rate=Rate(per_second=rate),
                prompt_tokens=Amount(mean=100.0),
                output_tokens=ANSWER,
                patience_seconds=2 * seconds if tenant == "nightly" else None,
            )
            for tenant, rate in streams
            if rate
        ),
        limits=SchedulerLimits(queue_depth_per_runner=100, durable_share=0.1, max_durable_waiting=100_000),
        duration_seconds=seconds,
    )


def run(scenario: Scenario) -> Simulation:
    simulation = Simulation(scenario, real_scheduler(scenario))
    simulation.run()
    return simulation


def tally(simulation: Simulation, band: Priority) -> GroupMetrics:
    return simulation.metrics.total(who for who in simulation.metrics.by_group if who.band is band)


def waits(simulation: Simulation) -> Waits:
    found = Waits.of(tally(simulation, Priority.NORMAL).waits)
    assert found is not None
    return found


def durable_part(simulation: Simulation) -> float:
    """Of what was served while requests came, 0 to 1."""
    durable = tally(simulation, Priority.DURABLE).served_cost
    return durable / (durable + tally(simulation, Priority.NORMAL).served_cost)


@SECONDS
def test_durable_requests_using_idle_capacity_barely_delay_callers(seconds: float) -> None:
    alone = run(mesh(seconds, callers_per_second=4.0))
    beside = run(mesh(seconds, callers_per_second=4.0, durable_per_second=10.0))
    assert tally(beside, Priority.NORMAL).served == tally(alone, Priority.NORMAL).served
    # Nobody is preempted: a caller may find every slot taken, and waits until the first one is free.
    assert waits(beside).p50 <= 0.3
    assert waits(beside).p99 <= 3.0 * waits(alone).p99
    assert durable_part(beside) >= 0.4, "or it was no test: callers leave half of the mesh idle"


@SECONDS
def test_same_load_at_normal_priority_would_delay_callers(seconds: float) -> None:
    """The control of the test above."""
    alone, flooded = run(mesh(seconds, callers_per_second=4.0)), run(mesh(seconds, callers_per_second=14.0))
    assert waits(flooded).p99 > 10.0 * waits(alone).p99
