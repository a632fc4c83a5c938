"""The same seed is the same run, event by event, in every process."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from kit.random_scenario import check_scenario, check_seed, random_scenario, real_scheduler

from weft_extensions.simulate.engine import Simulation
from weft_extensions.simulate.figures import figures_of
from weft_extensions.simulate.scenario import (
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
from weft_extensions.simulate.traffic import requests_of

ROOT = Path(__file__).parents[3]

DIGEST_OF_RUNS = """
from hashlib import sha256
from weft_extensions.simulate.engine import Simulation
from kit.random_scenario import random_scenario
from kit.random_scenario import real_scheduler
digest = sha256()
for seed in range(25):
    scenario = random_scenario(seed)
    simulation = Simulation(scenario, real_scheduler(scenario), explained=range(1, 200))
    simulation.run()
    digest.update(repr(simulation.decision_log.lines).encode())
print(digest.hexdigest())
"""


def decision_log(seed: int, scenario_seed: int) -> object:
    scenario = replace(random_scenario(scenario_seed), seed=seed)
    simulation = Simulation(scenario, real_scheduler(scenario), explained=range(1, 200))
    simulation.run()
    return simulation.decision_log.lines, figures_of(simulation)


@pytest.mark.parametrize("seed", [1, 2, 5, 8, 11])
def test_same_seed_gives_the_same_run(seed: int) -> None:
    assert decision_log(seed, seed) == decision_log(seed, seed)


def test_different_seed_gives_a_different_run() -> None:
    assert decision_log(1, 1) != decision_log(2, 1)


@pytest.mark.slow("starts Pythons with different hash seeds")
def test_run_does_not_depend_on_string_hashing() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", DIGEST_OF_RUNS],
            env={**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": str(ROOT / "tests")},
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
            timeout=100,
        ).stdout
        for hash_seed in (1, 2)
    }
    assert len(digests) == 1
    assert len(digests.pop().strip()) == 64


def test_traffic_does_not_depend_on_how_it_is_served() -> None:
    scenario = random_scenario(3)
    slower = replace(scenario, models=tuple(replace(each, slots=1) for each in scenario.models))
    drawn, other = (
        [(each.arrival.spec, each.arrival.arrived_at) for each in requests_of(run)] for run in (scenario, slower)
    )
    assert drawn == other


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
