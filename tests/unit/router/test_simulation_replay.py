"""The same seed is the same run, event by event, in every process."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from kit.random_scenario import random_scenario, real_scheduler

from router_svc.simulation.engine import Simulation
from router_svc.simulation.figures import figures_of
from router_svc.simulation.traffic import requests_of

ROOT = Path(__file__).parents[3]
DIGEST_OF_RUNS = """
from hashlib import sha256
from router_svc.simulation.engine import Simulation
from kit.random_scenario import random_scenario
from kit.random_scenario import real_scheduler
digest = sha256()
for seed in range(12):
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
            timeout=60,
        ).stdout
        for hash_seed in (1, 2, 3)
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
