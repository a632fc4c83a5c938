"""Generated traces beside the published figures of those that they imitate."""

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from bench.traces import SHAPES, trace, write
from router_svc.policy.pool_settings import ChoicePolicy
from router_svc.policy.scheduler import Scheduler
from weft_extensions.simulate.engine import Simulation
from weft_extensions.simulate.figures import quotes_kept
from weft_extensions.simulate.metrics import Waits
from weft_extensions.simulate.scenario import Scenario
from weft_extensions.simulate.scenario_file import load_scenario

PUBLISHED = {"conversation": (12_031, 12_035, 343, 0.40), "tool-agents": (23_608, 8_596, 182, 0.59)}
"""Requests, mean tokens of prompts and of answers, share of blocks in an earlier prompt (FAST '25, table 1)."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_trace_has_the_published_figures(name: str) -> None:
    lines, seen, known = trace(**SHAPES[name]), set[int](), 0
    for line in lines:
        known += len(seen.intersection(line.hash_ids))
        seen.update(line.hash_ids)
    requests, prompt, answer, share = PUBLISHED[name]
    assert len(lines) == requests
    assert fmean(line.input_length for line in lines) == pytest.approx(prompt, rel=0.03)
    assert fmean(line.output_length for line in lines) == pytest.approx(answer, rel=0.03)
    assert known / sum(len(line.hash_ids) for line in lines) == pytest.approx(share, abs=0.02)


def test_long_conversations_have_eight_turns() -> None:
    lines, last, turns = trace(**SHAPES["long-conversation"]), dict[int, int](), list[int]()
    for line in lines:
        own = line.hash_ids[1:]
        found = next((last[each] for each in reversed(own) if each in last), None)
        if found is None:
            found = len(turns)
            turns.append(0)
        turns[found] += 1
        last |= dict.fromkeys(own, found)
    assert fmean(turns) == pytest.approx(8, rel=0.15)


def replayed(name: str, folder: Path) -> Scenario:
    """A scenario of the beginning of a trace."""
    return load_scenario(write(name, folder, 4_000))


@pytest.mark.slow("4,000 requests")
@pytest.mark.parametrize("name", SHAPES)
def test_nine_of_ten_quotes_are_kept_on_a_trace(name: str, tmp_path: Path) -> None:
    scenario = replayed(name, tmp_path)
    simulation = Simulation(scenario, Scheduler(scenario.limits, scenario.settings))
    simulation.run()
    kept = quotes_kept(simulation)
    assert kept.keys() == {"first_token", "completion"}
    assert all(0.85 <= share <= 0.95 for share in kept.values()), kept


@pytest.mark.slow("4,000 requests, placed twice")
@pytest.mark.parametrize("name", SHAPES)
def test_first_tokens_of_a_trace_take_half_the_time_that_they_take_with_least_loaded(name: str, tmp_path: Path) -> None:
    scenario, times = replayed(name, tmp_path), []
    for policy in (ChoicePolicy.FIRST_TOKEN, ChoicePolicy.LEAST_LOADED):
        pools = {pool: replace(each, policy=policy) for pool, each in scenario.settings.pools.items()}
        simulation = Simulation(scenario, Scheduler(scenario.limits, replace(scenario.settings, pools=pools)))
        simulation.run()
        times.append(Waits.of(simulation.metrics.total().first_tokens))
    found, other = times
    assert found is not None
    assert other is not None
    assert found.p50 <= 0.45 * other.p50
    assert found.p95 <= 0.4 * other.p95
