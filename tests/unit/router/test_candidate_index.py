"""The members of queues, the free ones among them, and the slots that a router has granted."""

from typing import Any

import pytest
from index_harness import CHAT, chosen, index, member, pick, place, placed

from router_svc.policy.endpoints.candidates import Needs, Readiness
from router_svc.policy.endpoints.choice import MAX_CONSIDERED, SHOWN_OF_MANY
from router_svc.policy.endpoints.pool import Endpoint
from router_svc.policy.endpoints.routes import Route
from weft.kernel.errors.failover import FailureKind
from weft.kernel.requests.request_values import Operation

EMBED = Needs(Operation.EMBEDDING)


def test_model_name_resolves_to_its_pool_and_a_pool_name_to_itself() -> None:
    mesh = index(member("a"), member("b"), member("solo", pool="solo"))
    assert [mesh.table.queue_of(name) for name in ("a", "b", "p", "solo", "nothing")] == ["p", "p", "p", "solo", None]
    assert sorted(mesh.table.queues()) == ["p", "solo"]


def test_name_of_both_a_pool_and_a_model_resolves_to_the_pool() -> None:
    mesh = index(member("x", pool="p"), member("a", pool="x"))
    assert mesh.table.queue_of("x") == "x"
    assert [candidate.model for candidate in mesh.table.members("x")] == ["a"]


def test_only_known_routes_are_queues() -> None:
    mesh = index(member("a"), routes=[Route(name="code", candidates=("a",))])
    assert mesh.table.queue_of("route/code") == "route/code"
    assert mesh.table.queue_of("route/other") is None
    assert mesh.table.queue_of("code") is None


def test_candidate_is_in_the_queues_of_its_pool_and_the_routes_that_name_it() -> None:
    routes = [
        Route(name="r", candidates=("a", "p")),
        Route(name="s", candidates=("p",)),
        Route(name="t", candidates=("b",)),
    ]
    mesh = index(member("a"), member("b"), routes=routes)
    assert list(mesh.table.queues_of(member("a"))) == ["p", "route/r", "route/s"]


def test_model_that_changes_its_pool_keeps_its_running_requests() -> None:
    mesh = index(member("a"), member("b"))
    running = place(mesh, asked=pick(excluded=frozenset({member("b").key})))
    assert running is not None
    mesh.table.put(member("a", pool="q"))
    assert (mesh.in_flight_of_queue("p"), mesh.in_flight_of_queue("q")) == (0, 1)
    mesh.release(running)
    assert (mesh.in_flight_of_queue("q"), mesh.total_in_flight) == (0, 0)


def test_slot_that_was_not_granted_cannot_be_released() -> None:
    mesh = index(member("a"))
    with pytest.raises(AssertionError, match="granted"):
        mesh.release(member("a"))


def test_runner_at_its_total_limit_takes_no_request_on_any_model() -> None:
    on_one: dict[str, Any] = {"runner": "one", "runner_max_requests": 3}
    mesh = index(member("a", pool="a", **on_one), member("b", pool="b", **on_one))
    assert placed(mesh, 2, "a") + placed(mesh, 2, "b") == ["a", "a", "b", "nobody"]
    assert mesh.on_runner(member("b", pool="b", **on_one)) == 3
    assert not mesh.has_free("a")
    mesh.table.take_freed()
    mesh.release(member("b", pool="b", **on_one))
    assert sorted(mesh.table.take_freed()) == ["a", "b"]
    assert placed(mesh, 1, "a") == ["a"]


def test_pool_at_its_cap_takes_no_request_from_any_queue() -> None:
    mesh = index(member("a"), member("b"), max_in_flight=2, routes=[Route(name="r", candidates=("p",))])
    assert placed(mesh, 3) == ["a", "b", "nobody"]
    assert placed(mesh, 1, "route/r") == ["nobody"]
    assert not mesh.has_free("p")
    assert not mesh.has_free("route/r")
    mesh.table.take_freed()
    mesh.release(member("a"))
    assert list(mesh.table.take_freed()) == ["p", "route/r"]
    assert placed(mesh, 2, "route/r") == ["a", "nobody"]


def test_removed_candidates_leave_no_state() -> None:
    mesh = index()
    for number in range(50):
        mesh.table.put(member("a", incarnation=str(number)))
        running = place(mesh)
        assert running is not None
        mesh.table.drop("a")
        mesh.release(running)
    table = mesh.table
    assert (len(table.by_key), len(table._runners), len(table.pools), len(table._pool_steps)) == (0, 0, 0, 0)


def test_externally_busy_candidate_is_backed_off_for_longer_each_time() -> None:
    mesh = index(member("a"))
    for doubling in range(6):
        began = doubling * 10.0
        mesh.health.note_failure(member("a"), FailureKind.BUSY, began)
        pause = min(0.25 * 2**doubling, 2.0)
        assert mesh.table.by_key[member("a").key].health.next_end == began + pause
        assert place(mesh, now=began + pause - 0.01) is None
        mesh.table.take_freed()
        mesh.health.advance(began + pause)
        assert list(mesh.table.take_freed()) == ["p"]
        assert mesh.has_free("p")
    mesh.health.note_content(member("a"), 60.0)
    mesh.health.note_failure(member("a"), FailureKind.BUSY, 61.0)
    assert mesh.table.by_key[member("a").key].health.next_end == 61.25


@pytest.mark.parametrize(("kind", "seconds"), [(FailureKind.BOUNCED, 0.25), (FailureKind.BROKE, 1.0)])
def test_failed_candidate_is_backed_off_briefly(kind: FailureKind, seconds: float) -> None:
    mesh, only_a = index(member("a"), member("b")), pick(excluded=frozenset({member("b").key}))
    mesh.health.note_failure(member("a"), kind, 5.0)
    assert mesh.choose("p", only_a, 5.0 + seconds - 0.01) is None
    assert mesh.choose("p", only_a, 5.0 + seconds) is not None
    assert mesh.table.by_key[member("a").key].health.next_end is None


def test_prompt_failing_on_the_last_endpoint_does_not_delay_other_callers() -> None:
    mesh = index(member("a"))
    for second in range(100):
        mesh.health.note_failure(member("a"), FailureKind.BROKE, float(second))
        assert mesh.choose("p", pick(), float(second)) is not None


@pytest.mark.parametrize("kind", [FailureKind.LACKS, FailureKind.FINAL])
def test_candidate_without_a_resource_is_not_backed_off(kind: FailureKind) -> None:
    mesh = index(member("a"))
    mesh.health.note_failure(member("a"), kind, 5.0)
    assert place(mesh, now=5.0) is not None


def test_reports_of_a_removed_incarnation_do_not_affect_the_new_one() -> None:
    mesh = index(member("a", incarnation="2"))
    mesh.health.note_failure(member("a", incarnation="1"), FailureKind.BROKE, 0.0)
    mesh.health.note_content(member("a", incarnation="1"), 0.0)
    assert place(mesh) is not None


def test_choice_lists_the_considered_candidates_and_what_blocked_each() -> None:
    mesh = index(
        member("a"),
        member("b", slots=1),
        member("c", readiness=Readiness.ASLEEP),
        member("d", readiness=Readiness.DOWN),
        member("e", readiness=Readiness.LOADING),
        member("f", remote=True),
        member("g"),
        member("h"),
        member("i", runner_max_requests=1),
    )
    only_b = frozenset(member(name).key for name in "aghi")
    only_i = frozenset(member(name).key for name in "abgh")
    assert placed(mesh, 1, asked=pick(excluded=only_b)) + placed(mesh, 1, asked=pick(excluded=only_i)) == ["b", "i"]
    mesh.health.note_failure(member("g"), FailureKind.BUSY, 0.0)
    choice = mesh.choose("p", pick(excluded=frozenset({member("h").key})), 0.0)
    assert choice is not None
    assert (chosen(choice), choice.policy, choice.count) == ("a", "least_loaded", 9)
    assert choice.considered[0].chosen
    assert [each.score for each in choice.considered] == sorted((e.score for e in choice.considered), reverse=True)
    assert {each.model: each.gate for each in choice.considered} == {
        "a": "",
        "b": "its slot is busy",
        "c": "hibernating",
        "d": "no heartbeat",
        "e": "loading",
        "f": "remote, and the request has no permit",
        "g": "full with requests that this router did not place; retried in 0.2 s",
        "h": "an attempt of this request failed on it",
        "i": "its runner is at its limit of 1 requests",
    }


def test_candidate_gate_follows_its_state() -> None:
    mesh = index(member("a", slots=1), max_in_flight=2)

    def gate() -> str:
        [only] = mesh.considered("p", pick(), 0.0)
        return only.gate

    assert gate() == ""
    running = place(mesh)
    assert running is not None
    assert gate() == "its slot is busy"
    mesh.table.put(member("a", slots=4))
    assert gate() == ""
    place(mesh)
    assert gate() == "p has 2 of 2 requests running"
    mesh.release(running)
    assert gate() == ""
    mesh.table.hold(frozenset({running.key}))
    assert gate() == "held for another model to be loaded"
    [remote_asked] = mesh.considered("p", pick(EMBED), 0.0)
    assert remote_asked.gate == "does not offer embedding"


def test_only_some_of_many_candidates_are_listed_and_all_are_counted() -> None:
    mesh = index(*(member(f"m{number:03}") for number in range(200)))
    for number in range(100):
        mesh.table.put(member(f"m{number:03}", readiness=Readiness.ASLEEP))
    choice = mesh.choose("p", pick(), 0.0)
    assert choice is not None
    assert (chosen(choice), choice.count) == ("m100", 200)
    assert len(choice.considered) == SHOWN_OF_MANY
    assert choice.considered[0].model == "m100"
    considered = mesh.considered("p", pick(), 0.0)
    assert len(considered) == MAX_CONSIDERED
    assert considered[0].gate == ""


def test_request_in_a_pool_of_a_thousand_inspects_no_other_member(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = index(*(member(f"m{number:04}") for number in range(1_000)))
    looked_at: list[str] = []
    settle = Endpoint.settle

    def counted(seat: Endpoint) -> None:
        looked_at.append(seat.candidate.model)
        settle(seat)

    monkeypatch.setattr(Endpoint, "settle", counted)
    for _ in range(100):
        running = place(mesh)
        assert running is not None
        mesh.release(running)
        assert looked_at == [running.model, running.model]
        looked_at.clear()
    mesh.table.put(member("m0500", slots_reported_used=1))
    assert looked_at == ["m0500"]


def test_index_of_free_candidates_does_not_grow_with_the_requests() -> None:
    mesh = index(*(member(f"m{number}") for number in range(20)))
    for _ in range(5_000):
        running = place(mesh)
        assert running is not None
        mesh.release(running)
    [shelf] = mesh.table.pools["p"].fitting(CHAT)
    assert len(shelf._heap) <= 2 * 20 + 65
