"""Going where the cache is: sessions and beginnings of prompts."""

from collections import Counter
from itertools import pairwise
from typing import Any

from index_harness import chosen, index, member, pick, place, placed

from router_svc.policy.endpoints.candidate_index import CandidateIndex
from router_svc.policy.endpoints.candidates import Candidate, Readiness
from router_svc.policy.endpoints.choice import PickRequest
from router_svc.policy.endpoints.hash_ring import mix
from router_svc.policy.endpoints.selection import RecentEndpoints
from router_svc.policy.settings import ChoicePolicy

NAMES = "abcdefgh"
SESSION = b"tenant\0session"


def members(**changes: Any) -> list[Candidate]:
    return [member(name, **changes) for name in NAMES]


def by_prefix(*candidates: Candidate, **limits: float) -> CandidateIndex:
    return index(*(candidates or members()), policy=ChoicePolicy.PREFIX_AFFINITY, limits=limits)


def prompt(*beginnings: int) -> PickRequest:
    return pick(prefix_digests=tuple(mix(beginning) for beginning in beginnings))


def serve(mesh: CandidateIndex, asked: PickRequest) -> str:
    """Place a request and end it."""
    running = place(mesh, asked=asked)
    assert running is not None
    mesh.release(running)
    return running.model


def test_a_session_stays_where_it_ran_whatever_the_policy_of_the_pool() -> None:
    for policy in ChoicePolicy:
        mesh = index(*members(), policy=policy)
        first = serve(mesh, pick(affinity_key=SESSION))
        assert {serve(mesh, pick(affinity_key=SESSION, seed=seed)) for seed in range(20)} == {first}
        choice = mesh.choose("p", pick(affinity_key=SESSION), 0.0)
        assert choice is not None
        assert choice.policy == "session_affinity"


def test_without_a_session_the_policy_of_the_pool_decides() -> None:
    mesh = index(*members())
    assert len(set(placed(mesh, 8))) == 8


def test_a_session_does_not_wait_for_its_runner_and_stays_where_it_went_instead() -> None:
    mesh = index(*members(slots=1))
    home = place(mesh, asked=pick(affinity_key=SESSION))
    assert home is not None
    other = serve(mesh, pick(affinity_key=SESSION))
    assert other != home.model
    mesh.release(home)
    assert serve(mesh, pick(affinity_key=SESSION)) == other


def test_new_sessions_are_spread_over_all() -> None:
    mesh = index(*members(slots=100))
    counts = Counter(placed(mesh, 1, asked=pick(affinity_key=b"%d" % number))[0] for number in range(160))
    assert set(counts) == set(NAMES)
    assert max(counts.values()) <= 1.25 * 160 / len(NAMES) + 1


def test_every_router_finds_the_same_home_for_a_session() -> None:
    here, there = (index(*members()) for _ in range(2))
    serve(there, pick())
    keys = [b"%d" % number for number in range(40)]
    assert [serve(here, pick(affinity_key=key)) for key in keys] == [
        serve(there, pick(affinity_key=key)) for key in keys
    ]


def test_a_session_whose_runner_is_gone_or_held_or_excluded_goes_elsewhere() -> None:
    mesh = index(*members())
    home = serve(mesh, pick(affinity_key=SESSION))
    assert serve(mesh, pick(affinity_key=SESSION, excluded=frozenset({member(home).key}))) != home
    home = serve(mesh, pick(affinity_key=SESSION))
    mesh.table.hold(frozenset({member(home).key}))
    assert serve(mesh, pick(affinity_key=SESSION)) != home
    home = serve(mesh, pick(affinity_key=SESSION))
    mesh.table.put(member(home, readiness=Readiness.DOWN))
    assert serve(mesh, pick(affinity_key=SESSION)) != home


def test_sessions_beyond_the_bound_are_forgotten_in_the_order_of_their_last_use() -> None:
    places = RecentEndpoints(2)
    for key in (b"one", b"two", b"one", b"three"):
        places.note("p", key, member("a").key)
    assert len(places) == 2
    assert places.find("p", b"two") is None
    assert places.find("p", b"one") == member("a").key
    assert places.find("q", b"one") is None


def test_prompts_with_the_same_beginning_go_to_the_same_runner() -> None:
    mesh = by_prefix()
    homes = {serve(mesh, prompt(1, number)) for number in range(100, 120)}
    assert len(homes) == 1
    choice = mesh.choose("p", prompt(1, 5), 0.0)
    assert choice is not None
    assert choice.policy == "prefix_affinity"


def test_different_beginnings_are_spread() -> None:
    mesh = by_prefix()
    assert {serve(mesh, prompt(number)) for number in range(200)} == set(NAMES)


def test_the_longest_beginning_that_is_remembered_decides() -> None:
    mesh = by_prefix(*members(slots=8))
    first = serve(mesh, prompt(1))
    others = frozenset(member(name).key for name in NAMES if name != "h") - {member(first).key}
    second = serve(mesh, pick(prefix_digests=prompt(1, 2).prefix_digests, excluded=others | {member(first).key}))
    assert second != first
    third = serve(mesh, pick(prefix_digests=prompt(1, 7).prefix_digests, excluded=frozenset({member(second).key})))
    assert third != second
    assert serve(mesh, prompt(1, 2, 3)) == second


def test_a_runner_with_more_than_its_share_of_the_load_is_passed_over() -> None:
    mesh = by_prefix(*members(slots=32))
    counts = Counter(placed(mesh, 64, asked=prompt(1)))
    mean = 64 / len(NAMES)
    assert max(counts.values()) <= 1.25 * mean + 1
    assert len(counts) >= len(NAMES) / 1.25 - 1


def test_without_the_bound_on_load_one_runner_would_get_everything() -> None:
    mesh = by_prefix(*members(slots=32), affinity_load_factor=100.0)
    assert len(set(placed(mesh, 32, asked=prompt(1)))) == 1


def test_a_prompt_without_a_known_beginning_goes_by_load() -> None:
    mesh = by_prefix()
    assert len(set(placed(mesh, 8))) == 8
    choice = mesh.choose("p", pick(), 0.0)
    assert choice is not None
    assert choice.policy == "least_loaded"


def test_beginnings_are_remembered_up_to_a_bound() -> None:
    mesh = by_prefix(max_prefix_entries=10)
    for number in range(50):
        serve(mesh, prompt(number))
    assert len(mesh.selector.prefixes) == 10


def test_few_beginnings_change_their_home_when_a_runner_comes() -> None:
    before, after = by_prefix(), by_prefix(*members(), member("new"))
    keys = range(400)
    homes = [(serve(before, prompt(key)), serve(after, prompt(key))) for key in keys]
    moved = [(was, now) for was, now in homes if was != now]
    assert {now for _, now in moved} == {"new"}
    assert len(moved) < 2.5 * len(keys) / 9


def test_a_beginning_comes_home_when_its_runner_comes_back() -> None:
    mesh = by_prefix()
    keys = range(60)
    homes = [serve(mesh, prompt(key)) for key in keys]
    for round_trip in range(40):
        name = NAMES[round_trip % len(NAMES)]
        mesh.table.put(member(name, readiness=Readiness.DOWN))
        assert name not in {chosen(mesh.choose("p", prompt(1_000 + key), 0.0)) for key in keys}
        mesh.table.put(member(name))
    mesh.selector.prefixes = RecentEndpoints(1)
    assert [serve(mesh, prompt(key)) for key in keys] == homes


def test_affinity_is_to_a_pool_and_not_shared_with_another() -> None:
    mesh = index(
        member("a", pool="p"), member("b", pool="p"), member("c", pool="q"), policy=ChoicePolicy.PREFIX_AFFINITY
    )
    assert serve(mesh, prompt(1)) in "ab"
    assert place(mesh, "q", prompt(1)) is not None
    homes = [serve(mesh, prompt(1)) for _ in range(4)]
    assert all(one == other for one, other in pairwise(homes))
