"""Sessions go where they ran."""

from collections import Counter
from typing import Any

from index_harness import index, member, pick, place, placed

from router_svc.policy.endpoints.candidate_index import CandidateIndex
from router_svc.policy.endpoints.candidates import Candidate, Readiness
from router_svc.policy.endpoints.choice import PickRequest
from router_svc.policy.endpoints.load_balancer import SessionEndpoints
from router_svc.policy.settings import ChoicePolicy

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
