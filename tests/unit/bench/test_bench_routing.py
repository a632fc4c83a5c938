"""first_token beside an offline search and a model of smg, in virtual time."""

from dataclasses import replace
from statistics import fmean

import pytest

from bench.offline_search import Line, Trace, objective, play, search
from bench.placements import PromptCrowd
from bench.routing import GROUPS, Rival, World, outcome
from bench.sessions import Engine, Workload, engines_of
from bench.smg_model import SmgModel
from router_svc.policy.pool_settings import ChoicePolicy

WORKLOADS = {
    "idle": (Workload(prefill_ms=0.1), 1.3),
    "loaded": (Workload(prefill_ms=0.4), 1.6),
    "unequal engines": (Workload(prefill_ms=0.4, unequal=True), 1.8),
    "full": (Workload(prefill_ms=0.4, sessions=160), 1.6),
}
"""Each with the most that the mean time to the first token may be, times that of a search of 4,000 plans."""
SHORT = Workload(prefill_ms=0.4, sessions=32, turns=4)


@pytest.mark.slow("four searches of 4,000 plans")
@pytest.mark.parametrize("name", WORKLOADS)
def test_mean_time_to_first_token_is_close_to_an_offline_searchs(name: str) -> None:
    workload, most = WORKLOADS[name]
    searched, found = (outcome(workload, rival, [1], 4_000) for rival in (Rival.SEARCH, Rival.FIRST_TOKEN))
    assert found.average <= most * searched.average


def test_comparison_detects_a_policy_that_ignores_caches() -> None:
    searched, found = (outcome(SHORT, rival, [1], 300) for rival in (Rival.SEARCH, Rival.LEAST_LOADED))
    assert found.average > 2 * searched.average
    assert found.cached_share < 0.97 * searched.cached_share


def test_search_beats_every_router_soon() -> None:
    found = {rival: outcome(SHORT, rival, [2], 200) for rival in Rival}
    averages = {rival: each.average for rival, each in found.items()}
    assert min(averages, key=averages.__getitem__) is Rival.SEARCH


def test_search_does_not_depend_on_the_speed_of_the_machine() -> None:
    assert search(SHORT, 50) == search(SHORT, 50)


@pytest.mark.parametrize(
    "workload",
    [SHORT, replace(SHORT, unequal=True), Workload(sessions=200, turns=4)],
    ids=["equal engines", "unequal engines", "caches that evict and full slots"],
)
def test_search_replays_a_plan_like_the_world_does(workload: Workload) -> None:
    plan, trace = search(workload, 100), Trace(workload)
    lines = [Line(engine, trace) for engine in engines_of(workload)]
    firsts = play(trace, lines, lambda turn, _now, _lines: plan[turn])
    found = World(workload, plan).run()
    assert fmean(firsts) == pytest.approx(found.average)
    assert objective(firsts) == pytest.approx(found.p50 + found.p95 / 4 + found.average)


def engines(*loads: int) -> list[Engine]:
    return [Engine(1.0, 0.001, under_way=load) for load in loads]


def test_model_of_smg_follows_a_prefix_until_its_holder_is_crowded() -> None:
    model, prompt = SmgModel(), [b"a", b"b", b"c"]
    assert model.choose(prompt, engines(1, 0, 2)) == 1
    assert model.choose([*prompt, b"d"], engines(0, 4, 2)) == 1
    assert model.choose([b"a", b"x", b"y", b"z"], engines(0, 4, 2)) == 0, "a quarter of the prompt is too little"
    assert model.choose(prompt, engines(0, 9, 2)) == 0, "9 is above the mean by more than 2 sqrt(mean)"


@pytest.mark.slow("simulates 430 prompts")
def test_groups_share_engines_by_tenant_and_priority() -> None:
    crowd = Workload(prefill_ms=0.4, sessions=sum(GROUPS.values()), turns=3, groups=GROUPS)
    found = World(crowd, ChoicePolicy.FIRST_TOKEN).by_group()
    assert list(found) == list(GROUPS)
    assert found["few"].p50 < found["many"].p50, "the few have half of the engines"
    assert found["many"].p95 < found["low"].p95


def test_placements_of_prompts_are_measured_with_a_queue_that_stays_as_long() -> None:
    assert PromptCrowd(2, 5).placements_per_second(0.05) > 0
