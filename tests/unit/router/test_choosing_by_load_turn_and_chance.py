"""The selection policies least_loaded, round_robin and random."""

from collections import Counter
from dataclasses import replace

from index_harness import CHAT, chosen, index, member, pick, place, placed

from router_svc.policy.endpoints.choice import PickRequest
from router_svc.policy.settings import ChoicePolicy
from weft.kernel.request import Operation


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
    mesh.take(busy, 0.0)
    mesh.table.put(replace(busy, operations=frozenset(Operation)))
    second = mesh.choose("p", pick(seed=1), 0.0)
    assert second is not None
    assert second.candidate.model != busy.model, "the other one is idle"
