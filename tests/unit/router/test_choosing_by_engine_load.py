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
def test_an_engine_that_says_nothing_of_its_load_counts_as_its_slots_say(known: EngineFigures | None) -> None:
    load = engine_load(known)
    assert load == NO_ENGINE_LOAD
    assert load.used_share(2, 4) == 0.5
    assert not load.explanation(4)


def test_requests_of_others_count_like_granted_ones() -> None:
    load = engine_load(figures(running=3, others=2))
    assert load.used_share(1, 4) == 0.75
    assert load.explanation(4) == "2 requests of others are in its engine"


def test_a_slot_whose_request_waits_in_the_engine_does_not_count_and_its_request_counts_once() -> None:
    load = engine_load(figures(running=1, waiting=2))
    assert load.used_share(3, 4) == 1.5, "three requests in two slots that work"
    assert load.used_share(0, 4) == 0.0
    assert load.explanation(4) == "2 requests wait in its engine"


def test_an_engine_has_no_more_slots_than_its_cache_has_room_for_at_the_size_of_its_requests() -> None:
    load = engine_load(figures(running=6, cache_share=0.75))
    assert load.used_share(4, 16) == 0.5
    assert load.explanation(16) == "its KV cache has room for 8"
    assert load.used_share(4, 8) == 0.5
    assert not load.explanation(8), "it has as many slots"


def test_an_engine_always_counts_with_one_slot_at_least() -> None:
    assert engine_load(figures(running=1, waiting=9)).used_share(4, 4) == 4.0
    assert engine_load(figures(running=1, cache_share=1.0)).used_share(1, 4) == 1.0
    assert engine_load(None).used_share(1, 0) == 1.0


def test_several_facts_are_told_together() -> None:
    load = engine_load(figures(running=2, waiting=1, others=1, cache_share=1.0))
    words = "1 request waits in its engine, 1 request of others is in its engine, its KV cache has room for 2"
    assert load.explanation(4) == words


def test_a_member_whose_engine_serves_others_is_behind_one_that_is_idle() -> None:
    mesh = index(member("a"), member("b"))
    reported(mesh, "a", others=2)
    assert placed(mesh, 5) == ["b", "b", "a", "b", "a"]


def test_a_member_with_a_full_cache_gets_requests_only_where_no_other_slot_is_free() -> None:
    mesh = index(member("a"), member("b"))
    reported(mesh, "a", **FULL)
    assert placed(mesh, 8) == ["a", "b", "b", "b", "b", "a", "a", "a"], "beyond its room it is last, and not closed"


def test_figures_that_are_too_old_say_nothing() -> None:
    mesh = index(member("a"), member("b"))
    reported(mesh, "a", now=10.0, others=1)
    assert first(mesh, 10.0 + LIMIT_SECONDS - 0.1) == "b"
    assert first(mesh, 10.0 + LIMIT_SECONDS) == "a"


def test_the_same_sample_in_a_later_report_does_not_become_younger() -> None:
    mesh = index(member("a"), member("b"))
    busy = reported(mesh, "a", others=1)
    again = replace(busy, slots_reported_used=1)
    mesh.table.put(again)
    mesh.figures.note(again, 20.0)
    assert first(mesh, LIMIT_SECONDS - 0.1) == "b"
    mesh.choose("p", pick(), LIMIT_SECONDS)
    assert mesh.table.by_key[again.key].engine_load is NO_ENGINE_LOAD


def test_a_newer_sample_with_the_same_figures_renews_them() -> None:
    mesh = index(member("a"), member("b"))
    reported(mesh, "a", others=1)
    reported(mesh, "a", now=20.0, others=1, sampled_at=120.0)
    assert first(mesh, LIMIT_SECONDS + 1.0) == "b"
    assert first(mesh, 20.0 + LIMIT_SECONDS) == "a"


def test_an_engine_that_has_no_request_any_more_counts_at_once_as_its_slots_say() -> None:
    mesh = index(member("a"), member("b"))
    reported(mesh, "a", others=1)
    mesh.table.put(member("a"))
    mesh.figures.note(member("a"), 1.0)
    assert first(mesh, 1.0) == "a"


def test_a_member_whose_engine_is_full_is_not_preferred_for_its_cache() -> None:
    mesh = index(member("a"), member("b"), policy=ChoicePolicy.FIRST_TOKEN)
    asked = pick(prefix_digests=(7,), prompt_tokens=300)
    owner = place(mesh, asked=asked)
    assert owner is not None
    mesh.release(owner)
    assert chosen(mesh.choose("p", asked, 0.0)) == owner.model
    reported(mesh, owner.model, others=4)
    assert chosen(mesh.choose("p", asked, 0.0)) != owner.model


def test_a_choice_says_why_a_member_counts_as_busier_than_its_slots_say() -> None:
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
