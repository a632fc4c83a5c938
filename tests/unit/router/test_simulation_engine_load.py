"""What the figures of engines are worth to the router, in virtual time."""

from dataclasses import replace
from pathlib import Path

import pytest

from router_svc.simulation.engine import Simulation
from router_svc.simulation.figures import Figures, figures_of
from router_svc.simulation.metrics import Waits
from router_svc.simulation.random_scenario import real_scheduler
from router_svc.simulation.scenario import HostGroup, Scenario
from weft_app.config.scenario import load_scenario

UNEVEN = Path(__file__).parents[3] / "examples" / "scenarios" / "uneven-engines.yaml"
NEVER_FRESH_SECONDS = 1e-6
SEEDS = (1, *(pytest.param(seed, marks=pytest.mark.heavy) for seed in (2, 3)))


def run(scenario: Scenario) -> Figures:
    simulation = Simulation(scenario, real_scheduler(scenario))
    simulation.run()
    return figures_of(simulation)


def waits(figures: Figures) -> Waits:
    assert figures.total.served == figures.total.requests, "every request is served"
    assert figures.total.waits is not None
    return figures.total.waits


def until(scenario: Scenario, seconds: float) -> Scenario:
    hosts = tuple(replace(host, figures_until_seconds=seconds) for host in scenario.hosts)
    return replace(scenario, hosts=hosts)


@pytest.mark.parametrize("seed", SEEDS)
def test_figures_of_engines_spare_requests_the_wait_in_an_engine_with_a_small_cache(seed: int) -> None:
    scenario = replace(load_scenario(UNEVEN), seed=seed)
    with_figures, without = waits(run(scenario)), waits(run(until(scenario, 0.0)))
    assert without.p95 > 5.0
    assert with_figures.p95 <= 0.1 * without.p95
    assert with_figures.p99 <= 0.5 * without.p99


@pytest.mark.parametrize("seed", SEEDS)
def test_figures_that_cease_to_arrive_leave_it_no_worse_than_without_them(seed: int) -> None:
    scenario = replace(load_scenario(UNEVEN), seed=seed)
    ceasing, without = waits(run(until(scenario, 300.0))), waits(run(until(scenario, 0.0)))
    assert ceasing.p95 <= without.p95
    assert ceasing.p99 <= without.p99


def test_figures_that_never_count_change_nothing() -> None:
    scenario = load_scenario(UNEVEN)
    ignored = replace(scenario, limits=replace(scenario.limits, engine_figures_seconds=NEVER_FRESH_SECONDS))
    assert waits(run(ignored)) == waits(run(until(scenario, 0.0)))


@pytest.mark.parametrize("room", [10, 12])
def test_figures_of_engines_that_are_all_alike_do_no_harm(room: int) -> None:
    scenario = load_scenario(UNEVEN)
    alike = replace(scenario, hosts=(HostGroup(name="server", count=3, engine_requests=room),))
    with_figures, without = waits(run(alike)), waits(run(until(alike, 0.0)))
    assert with_figures.p95 <= without.p95
    assert with_figures.p99 <= without.p99
    assert with_figures.longest <= without.longest
