"""The selection policies least_loaded, round_robin and random."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from index_harness import CHAT, chosen, index, member, pick, place, placed

from router_svc.policy.endpoints.candidate_index import CandidateIndex
from router_svc.policy.endpoints.candidates import Candidate, Readiness
from router_svc.policy.endpoints.choice import PickRequest
from router_svc.policy.endpoints.engine_load import NO_ENGINE_LOAD, EngineFigures, engine_load
from router_svc.policy.endpoints.load_balancer import SessionEndpoints
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.pool_settings import ChoicePolicy
from weft.kernel.requests.request_values import Operation


def test_lowest_share_of_used_slots_is_chosen() -> None:
    mesh = index(member("big", slots=4), member("small", slots=1))
    assert placed(mesh, 6) == ["big", "small", "big", "big", "big", "nobody"]


def test_equal_load_is_decided_by_the_runners_report() -> None:
    mesh = index(member("a", slots_reported_used=2), member("b", slots_reported_used=1))
    assert placed(mesh, 1) == ["b"]
    mesh.table.put(member("b", slots_reported_used=4))
    mesh.release(member("b"))
    assert placed(mesh, 1) == ["a"]


def test_equal_reports_are_decided_by_the_least_recent_grant() -> None:
    mesh = index(member("a"), member("b"), member("c"))
    for expected in ("a", "b", "c", "a", "b"):
        running = place(mesh)
        assert running is not None
        assert running.model == expected
        mesh.release(running)


def test_never_granted_members_are_chosen_by_name() -> None:
    assert placed(index(member("b"), member("a")), 1) == ["a"]


def test_members_of_different_kinds_are_compared() -> None:
    mesh = index(member("a", context_tokens=4096), member("b", context_tokens=8192), member("c"))
    assert placed(mesh, 6) == ["a", "b", "c", "a", "b", "c"]
    long = pick(replace(CHAT, context_tokens=8192))
    assert placed(mesh, 2, asked=long) == ["b", "c"]


def test_round_robin_rotates_for_any_load_and_within_one_instant() -> None:
    mesh = index(member("a", slots=9), member("b", slots=2), member("c", slots=9), policy=ChoicePolicy.ROUND_ROBIN)
    assert placed(mesh, 8) == ["a", "b", "c", "a", "b", "c", "a", "c"]
    choice = mesh.choose("p", pick(), 0.0)
    assert choice is not None
    assert choice.policy == "round_robin"


def test_round_robin_returns_to_an_excluded_member() -> None:
    mesh = index(member("a"), member("b"), member("c"), policy=ChoicePolicy.ROUND_ROBIN)
    assert placed(mesh, 1, asked=pick(excluded=frozenset({member("a").key}))) == ["b"]
    assert placed(mesh, 3) == ["a", "c", "b"]


def _drawn(asked: PickRequest, names: str, seeds: int) -> Counter[str]:
    mesh = index(*(member(name) for name in names), policy=ChoicePolicy.RANDOM)
    return Counter(chosen(mesh.choose("p", asked._replace(seed=seed), 0.0)) for seed in range(seeds))


def test_random_choice_is_uniform() -> None:
    drawn = _drawn(pick(), "abcde", 5_000)
    assert set(drawn) == set("abcde")
    assert all(900 < count < 1_100 for count in drawn.values())


def test_random_choice_never_picks_an_excluded_member_and_is_uniform_over_the_rest() -> None:
    drawn = _drawn(pick(excluded=frozenset(member(name).key for name in "bd")), "abcde", 3_000)
    assert set(drawn) == set("ace")
    assert all(900 < count < 1_100 for count in drawn.values())


def test_random_choice_finds_the_only_member_not_excluded() -> None:
    names = [f"m{number:03}" for number in range(200)]
    mesh = index(*(member(name) for name in names), policy=ChoicePolicy.RANDOM)
    excluded = frozenset(member(name).key for name in names[:-1])
    found = {chosen(mesh.choose("p", pick(excluded=excluded, seed=seed), 0.0)) for seed in range(20)}
    assert found == {"m199"}
    everybody = excluded | {member("m199").key}
    assert mesh.choose("p", pick(excluded=everybody), 0.0) is None


def test_random_choice_is_deterministic_for_a_seed() -> None:
    first, second = (_drawn(pick(), "abcdefgh", 50) for _ in range(2))
    assert first == second


def test_random_choice_picks_only_free_members() -> None:
    mesh = index(member("a", slots=1), member("b", slots=1), member("c", slots=1), policy=ChoicePolicy.RANDOM)
    assert sorted(placed(mesh, 4, asked=pick(seed=7))) == ["a", "b", "c", "nobody"]


def test_member_with_changed_capabilities_is_not_chosen_by_its_old_rank() -> None:
    mesh = index(member("a", slots=2), member("b", slots=2))
    first = mesh.choose("p", pick(), 0.0)
    assert first is not None
    busy = first.candidate
    mesh.take(busy)
    mesh.table.put(replace(busy, operations=frozenset(Operation)))
    second = mesh.choose("p", pick(seed=1), 0.0)
    assert second is not None
    assert second.candidate.model != busy.model, "the other one is idle"


NAMES = "abcdefgh"

SESSION = b"tenant\0session"


def members(**changes: Any) -> list[Candidate]:
    return [member(name, **changes) for name in NAMES]


def serve(mesh: CandidateIndex, asked: PickRequest) -> str:
    """Place a request and end it."""
    running = place(mesh, asked=asked)
    assert running is not None
    mesh.release(running)
    return running.model


def test_session_stays_on_its_runner_under_any_pool_policy() -> None:
    for policy in ChoicePolicy:
        mesh = index(*members(), policy=policy)
        first = serve(mesh, pick(affinity_key=SESSION))
        assert {serve(mesh, pick(affinity_key=SESSION, seed=seed)) for seed in range(20)} == {first}
        choice = mesh.choose("p", pick(affinity_key=SESSION), 0.0)
        assert choice is not None
        assert choice.policy == "session_affinity"


def test_pool_policy_decides_without_a_session() -> None:
    mesh = index(*members())
    assert len(set(placed(mesh, 8))) == 8


def test_session_does_not_wait_for_its_busy_runner_and_stays_on_the_new_one() -> None:
    mesh = index(*members(slots=1))
    home = place(mesh, asked=pick(affinity_key=SESSION))
    assert home is not None
    other = serve(mesh, pick(affinity_key=SESSION))
    assert other != home.model
    mesh.release(home)
    assert serve(mesh, pick(affinity_key=SESSION)) == other


def test_new_sessions_are_spread_over_all_members() -> None:
    mesh = index(*members(slots=100))
    counts = Counter(placed(mesh, 1, asked=pick(affinity_key=b"%d" % number))[0] for number in range(160))
    assert set(counts) == set(NAMES)
    assert max(counts.values()) <= 1.25 * 160 / len(NAMES) + 1


def test_session_moves_if_its_runner_is_gone_held_or_excluded() -> None:
    mesh = index(*members())
    home = serve(mesh, pick(affinity_key=SESSION))
    assert serve(mesh, pick(affinity_key=SESSION, excluded=frozenset({member(home).key}))) != home
    home = serve(mesh, pick(affinity_key=SESSION))
    mesh.table.hold(frozenset({member(home).key}))
    assert serve(mesh, pick(affinity_key=SESSION)) != home
    home = serve(mesh, pick(affinity_key=SESSION))
    mesh.table.put(member(home, readiness=Readiness.DOWN))
    assert serve(mesh, pick(affinity_key=SESSION)) != home


def test_sessions_beyond_the_bound_are_evicted_in_lru_order() -> None:
    places = SessionEndpoints(2)
    for key in (b"one", b"two", b"one", b"three"):
        places.note("p", key, member("a").key)
    assert len(places) == 2
    assert places.find("p", b"two") is None
    assert places.find("p", b"one") == member("a").key
    assert places.find("q", b"one") is None


LIMIT_SECONDS = SchedulerLimits().engine_figures_seconds

FULL = {"running": 1, "cache_share": 1.0}

"""An engine with room for one request."""


def figures(**fields: Any) -> EngineFigures:
    return EngineFigures(**{"sampled_at": 100.0, **fields})


def reported(mesh: CandidateIndex, name: str, now: float = 0.0, **fields: Any) -> Candidate:
    """A member whose runner reports figures of its engine."""
    candidate = replace(member(name), engine=figures(**fields))
    mesh.table.put(candidate)
    mesh.figures.note(candidate, now)
    return candidate


def first(mesh: CandidateIndex, now: float = 0.0) -> str:
    return chosen(mesh.choose("p", pick(), now))


@pytest.mark.parametrize(
    "known", [None, figures(), figures(running=3)], ids=["none", "idle", "use of the cache unknown"]
)
def test_engine_without_load_figures_counts_by_its_slots(known: EngineFigures | None) -> None:
    load = engine_load(known)
    assert load == NO_ENGINE_LOAD
    assert load.used_share(2, 4) == 0.5
    assert not load.explanation(4)


def test_requests_of_other_clients_count_like_granted_ones() -> None:
    load = engine_load(figures(running=3, others=2))
    assert load.used_share(1, 4) == 0.75
    assert load.explanation(4) == "2 requests of others are in its engine"


def test_slot_with_a_request_queued_in_the_engine_is_not_counted_twice() -> None:
    load = engine_load(figures(running=1, waiting=2))
    assert load.used_share(3, 4) == 1.5, "three requests in two slots that work"
    assert load.used_share(0, 4) == 0.0
    assert load.explanation(4) == "2 requests wait in its engine"


def test_engine_slots_are_limited_by_cache_room_at_its_request_size() -> None:
    load = engine_load(figures(running=6, cache_share=0.75))
    assert load.used_share(4, 16) == 0.5
    assert load.explanation(16) == "its KV cache has room for 8"
    assert load.used_share(4, 8) == 0.5
    assert not load.explanation(8), "it has as many slots"


def test_engine_counts_with_at_least_one_slot() -> None:
    assert engine_load(figures(running=1, waiting=9)).used_share(4, 4) == 4.0
    assert engine_load(figures(running=1, cache_share=1.0)).used_share(1, 4) == 1.0
    assert engine_load(None).used_share(1, 0) == 1.0


def test_several_load_facts_are_explained_together() -> None:
    load = engine_load(figures(running=2, waiting=1, others=1, cache_share=1.0))
    words = "1 request waits in its engine, 1 request of others is in its engine, its KV cache has room for 2"
    assert load.explanation(4) == words


def test_member_with_an_engine_serving_others_ranks_behind_an_idle_one() -> None:
    mesh = index(member("a"), member("b"))
    reported(mesh, "a", others=2)
    assert placed(mesh, 5) == ["b", "b", "a", "b", "a"]


def test_member_with_a_full_cache_gets_requests_only_if_no_other_slot_is_free() -> None:
    mesh = index(member("a"), member("b"))
    reported(mesh, "a", **FULL)
    assert placed(mesh, 8) == ["a", "b", "b", "b", "b", "a", "a", "a"], "beyond its room it is last, and not closed"


def test_stale_figures_are_ignored() -> None:
    mesh = index(member("a"), member("b"))
    reported(mesh, "a", now=10.0, others=1)
    assert first(mesh, 10.0 + LIMIT_SECONDS - 0.1) == "b"
    assert first(mesh, 10.0 + LIMIT_SECONDS) == "a"


def test_repeated_sample_in_a_later_report_keeps_its_age() -> None:
    mesh = index(member("a"), member("b"))
    busy = reported(mesh, "a", others=1)
    again = replace(busy, slots_reported_used=1)
    mesh.table.put(again)
    mesh.figures.note(again, 20.0)
    assert first(mesh, LIMIT_SECONDS - 0.1) == "b"
    mesh.choose("p", pick(), LIMIT_SECONDS)
    assert mesh.table.by_key[again.key].engine_load is NO_ENGINE_LOAD


def test_newer_sample_with_the_same_figures_renews_them() -> None:
    mesh = index(member("a"), member("b"))
    reported(mesh, "a", others=1)
    reported(mesh, "a", now=20.0, others=1, sampled_at=120.0)
    assert first(mesh, LIMIT_SECONDS + 1.0) == "b"
    assert first(mesh, 20.0 + LIMIT_SECONDS) == "a"


def test_engine_without_requests_counts_by_its_slots_immediately() -> None:
    mesh = index(member("a"), member("b"))
    reported(mesh, "a", others=1)
    mesh.table.put(member("a"))
    mesh.figures.note(member("a"), 1.0)
    assert first(mesh, 1.0) == "a"


def test_member_with_a_full_engine_is_not_preferred_for_its_cache() -> None:
    mesh = index(member("a"), member("b"), policy=ChoicePolicy.FIRST_TOKEN)
    asked = pick(prefix_digests=(7,), prompt_tokens=300)
    owner = place(mesh, asked=asked)
    assert owner is not None
    mesh.release(owner)
    assert chosen(mesh.choose("p", asked, 0.0)) == owner.model
    reported(mesh, owner.model, others=4)
    assert chosen(mesh.choose("p", asked, 0.0)) != owner.model


def test_choice_explains_why_a_member_counts_as_busier_than_its_slots() -> None:
    mesh = index(member("a"), member("b"))
    reported(mesh, "a", running=1, waiting=3, others=2)
    choice = mesh.choose("p", pick(), 0.0)
    assert choice is not None
    taken, other = choice.considered
    assert (taken.model, taken.engine_load) == ("b", "")
    assert (other.model, other.gate) == ("a", ""), "nothing keeps it from being chosen"
    assert other.engine_load == "3 requests wait in its engine, 2 requests of others are in its engine"
    assert other.score < taken.score
    reported(mesh, "b", others=1)
    again = mesh.choose("p", pick(), 0.0)
    assert again is not None
    assert all(each.engine_load for each in again.considered)
