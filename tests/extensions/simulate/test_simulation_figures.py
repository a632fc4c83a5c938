"""What the scheduler is measured by, in virtual time: fairness and swaps, overload, outage."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from kit.random_scenario import real_scheduler

from router_svc.policy.endpoints.retry import RETRY_SHARE
from router_svc.policy.port import SchedulerPort
from weft_extensions.simulate.engine import Simulation
from weft_extensions.simulate.fifo_baseline import FifoScheduler
from weft_extensions.simulate.figures import Figures, figures_of
from weft_extensions.simulate.scenario import Failure, FailureMode, Rate, Scenario, Traffic
from weft_extensions.simulate.scenario_file import load_scenario

SCENARIOS = Path(__file__).parents[3] / "examples" / "scenarios"
PER_SECOND = {"big": 1.5, "small": 0.15, "tiny": 0.15}
"""10:1:1."""
STATISTICS = pytest.mark.nightly("statistics of the simulator")
SHORT_SEED = 4
MODELS = ("qwen", "llama", "mistral")


def fifo(scenario: Scenario) -> SchedulerPort:
    return FifoScheduler(scenario)


def run(scenario: Scenario, make: Callable[[Scenario], SchedulerPort] = real_scheduler) -> Figures:
    simulation = Simulation(scenario, make(scenario))
    simulation.run()
    return figures_of(simulation)


def three_tenants(seconds: float, *, each_its_own_model: bool, seed: int = 1) -> Scenario:
    scenario = replace(load_scenario(SCENARIOS / "three-tenants.yaml"), duration_seconds=seconds, seed=seed)
    assert {each.tenant: each.rate for each in scenario.traffic} == {
        tenant: Rate(per_second=rate) for tenant, rate in PER_SECOND.items()
    }
    if each_its_own_model:
        return scenario
    like = scenario.traffic[0]
    return replace(
        scenario,
        traffic=tuple(of_tenant(like, tenant, model) for tenant in PER_SECOND for model in MODELS),
    )


def of_tenant(like: Traffic, tenant: str, model: str) -> Traffic:
    return replace(like, tenant=tenant, target=model, rate=Rate(per_second=PER_SECOND[tenant] / len(MODELS)))


@pytest.mark.parametrize("each_its_own_model", [True, False], ids=["a model each", "all models for all"])
@pytest.mark.parametrize(
    ("seed", "seconds"), [(SHORT_SEED, 90.0), *(pytest.param(n, 1200.0, marks=STATISTICS) for n in (1, 2))]
)
def test_tenants_get_even_shares_with_half_the_swaps_of_fifo(
    each_its_own_model: bool, seed: int, seconds: float
) -> None:
    scenario = three_tenants(seconds, each_its_own_model=each_its_own_model, seed=seed)
    ours, control = run(scenario), run(scenario, fifo)
    assert ours.fairness >= 0.9
    assert ours.swaps_per_1000 <= control.swaps_per_1000 / 2
    assert ours.total.served > control.total.served
    assert ours.cold_waits is not None
    assert ours.cold_waits.longest <= ours.cold_wait_bound_seconds


@pytest.mark.parametrize("seconds", [120.0, pytest.param(1200.0, marks=STATISTICS)])
def test_fifo_does_not_give_even_shares(seconds: float) -> None:
    assert run(three_tenants(seconds, each_its_own_model=False), fifo).fairness < 0.7


@pytest.mark.parametrize("seconds", [20.0, pytest.param(300.0, marks=STATISTICS)])
def test_goodput_at_five_times_capacity_stays_near_its_peak(seconds: float) -> None:
    scenario = replace(load_scenario(SCENARIOS / "overload.yaml"), duration_seconds=seconds)
    peak = max(run(scenario.at_load(load)).total.good_tokens_per_second for load in (0.8, 1.0, 1.2))
    flooded = run(scenario.at_load(5.0))
    assert flooded.total.served < flooded.total.requests / 3, "the flood must be one"
    assert flooded.total.good_tokens_per_second >= 0.9 * peak
    high = next(band for band in flooded.bands if band.name == "high")
    assert high.served >= 0.99 * high.requests


@STATISTICS
def test_few_requests_are_retried_in_a_total_outage() -> None:
    outage = Failure(mode=FailureMode.BREAKS, at_seconds=0.0, for_seconds=3600.0)
    scenario = replace(load_scenario(SCENARIOS / "outage.yaml"), duration_seconds=300.0, failures=(outage,))
    ours, control = run(scenario), run(scenario, fifo)
    assert ours.total.served == 0
    # Beside the budget, a retry may go to each runner that has not failed yet.
    allowed = RETRY_SHARE * ours.total.requests + scenario.limits.retry_reserve + scenario.hosts[0].count
    assert ours.attempts - ours.total.requests <= allowed
    assert control.attempts > 2 * control.total.requests, "whoever tries on regardless must be seen to"


def test_failure_of_one_of_many_runners_loses_only_started_answers() -> None:
    scenario = replace(load_scenario(SCENARIOS / "outage.yaml"), duration_seconds=290.0)
    figures = run(replace(scenario, failures=scenario.failures[:1]))
    lost = figures.total.requests - figures.total.served
    # Those that had shown content when it died, at most as many as it has slots.
    assert lost == figures.total.refused.get("worker_lost", 0) <= scenario.models[0].slots
