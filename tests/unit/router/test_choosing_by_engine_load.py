"""How the figures of engines order the members of a pool."""

from dataclasses import replace
from typing import Any

import pytest
from index_harness import chosen, index, member, pick, place, placed

from router_svc.policy.endpoints.candidate_index import CandidateIndex
from router_svc.policy.endpoints.candidates import Candidate
from router_svc.policy.endpoints.engine_load import NO_ENGINE_LOAD, EngineFigures, engine_load
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.settings import ChoicePolicy

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
