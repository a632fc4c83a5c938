"""What the figures of engines are worth to the router, in virtual time."""

from dataclasses import replace
from pathlib import Path

import pytest
from kit.random_scenario import real_scheduler

from weft_extensions.simulate.engine import Simulation
from weft_extensions.simulate.figures import Figures, figures_of
from weft_extensions.simulate.metrics import Waits
from weft_extensions.simulate.scenario import HostGroup, Scenario
from weft_extensions.simulate.scenario_file import load_scenario

UNEVEN = Path(__file__).parents[3] / "examples" / "scenarios" / "uneven-engines.yaml"
NEVER_FRESH_SECONDS = 1e-6
STATISTICS = pytest.mark.nightly("statistics of the simulator")
RUNS = [(1, 120.0), *(pytest.param(seed, 900.0, marks=STATISTICS) for seed in (1, 2, 3))]
"""The seed of a run and its seconds."""
SECONDS = [120.0, pytest.param(900.0, marks=STATISTICS)]


def uneven(seconds: float, seed: int | None = None) -> Scenario:
    scenario = replace(load_scenario(UNEVEN), duration_seconds=seconds)
    return scenario if seed is None else replace(scenario, seed=seed)


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


@pytest.mark.parametrize(("seed", "seconds"), RUNS)
def test_engine_figures_avoid_waits_in_an_engine_with_a_small_cache(seed: int, seconds: float) -> None:
    scenario = uneven(seconds, seed)
    with_figures, without = waits(run(scenario)), waits(run(until(scenario, 0.0)))
    assert without.p95 > 5.0
    assert with_figures.p95 <= 0.1 * without.p95
    assert with_figures.p99 <= 0.5 * without.p99


@pytest.mark.parametrize(("seed", "seconds"), RUNS)
def test_stale_engine_figures_are_no_worse_than_none(seed: int, seconds: float) -> None:
    scenario = uneven(seconds, seed)
    ceasing, without = waits(run(until(scenario, seconds / 3))), waits(run(until(scenario, 0.0)))
    assert ceasing.p95 <= without.p95
    assert ceasing.p99 <= without.p99


@pytest.mark.parametrize("seconds", SECONDS)
def test_figures_that_never_apply_change_nothing(seconds: float) -> None:
    scenario = uneven(seconds)
    ignored = replace(scenario, limits=replace(scenario.limits, engine_figures_seconds=NEVER_FRESH_SECONDS))
    assert waits(run(ignored)) == waits(run(until(scenario, 0.0)))


@pytest.mark.parametrize("seconds", SECONDS)
@pytest.mark.parametrize("room", [10, 12])
def test_engine_figures_do_no_harm_with_identical_engines(room: int, seconds: float) -> None:
    scenario = uneven(seconds)
    alike = replace(scenario, hosts=(HostGroup(name="server", count=3, engine_requests=room),))
    with_figures, without = waits(run(alike)), waits(run(until(alike, 0.0)))
    assert with_figures.p95 <= without.p95
    assert with_figures.p99 <= without.p99
    assert with_figures.longest <= without.longest
