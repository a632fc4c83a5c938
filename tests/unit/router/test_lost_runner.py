"""A pool's only runner dies and returns: requests of which nothing reached a caller wait for it in the queue."""

from scheduler_harness import (
    Mesh,
    arrival,
    asleep,
    candidate,
    failed,
    placed,
    refusals,
    rejected,
    scheduler,
    woken,
)

from router_svc.policy.endpoints.candidates import Readiness
from weft.kernel.errors.reasons import Reason

LOST, UNREACHABLE = Reason.WORKER_LOST, Reason.RUNNER_UNREACHABLE


def refuse_all(mesh: Mesh, until: float, attempts: dict[int, int]) -> dict[int, Reason]:
    """Refuses every connection, four times a second, until this time; returns which requests were refused, and why."""
    ended: dict[int, Reason] = {}
    for quarter in range(1, round(until * 4) + 1):
        decisions = mesh.tick(quarter / 4)
        ended |= rejected(decisions)
        for key in placed(decisions):
            attempts[key] += 1
            ended |= rejected(mesh.report_failed(key, attempts[key], UNREACHABLE, quarter / 4))
    return ended


def test_fault_n7_requests_wait_for_the_only_runner_while_it_restarts() -> None:
    mesh = scheduler(candidate(slots=2))
    attempts = {1: 1, 2: 1}
    for key in attempts:
        mesh.submit(arrival(key), 0.0)
    assert not rejected(mesh.report_failed(1, 1, LOST, 0.0)), "its connection broke"
    assert not rejected(mesh.report_failed(2, 1, UNREACHABLE, 0.0)), "its connection was refused"
    attempts[3] = 0
    assert not rejected(mesh.submit(arrival(3), 0.1))
    assert not refuse_all(mesh, 10.0, attempts)
    back = mesh.show([candidate(slots=4, incarnation="2")], 10.0)
    assert placed(back) == {1: "a", 2: "a", 3: "a"}


def test_dead_runner_is_tried_less_and_less_often() -> None:
    mesh = scheduler(candidate(), queue_timeout_seconds=60.0)
    attempts = {1: 1}
    mesh.submit(arrival(1), 0.0)
    mesh.report_failed(1, 1, UNREACHABLE, 0.0)
    refuse_all(mesh, 20.0, attempts)
    assert 10 <= attempts[1] <= 13, "after 0.25 s, 0.5 s, 1 s, and then every 2 s"


def test_requests_that_a_dying_runner_drops_together_pause_it_once() -> None:
    mesh = scheduler(candidate(slots=8))
    for key in range(8):
        mesh.submit(arrival(key), 0.0)
    for key in range(8):
        mesh.report_failed(key, 1, UNREACHABLE, 0.0)
    assert len(placed(mesh.tick(0.25))) == 8


def test_request_that_was_lost_with_its_only_runner_three_times_fails() -> None:
    """It may be the cause."""
    mesh = scheduler(candidate())
    mesh.submit(arrival(1), 0.0)
    for attempt in (1, 2):
        assert not rejected(mesh.report_failed(1, attempt, LOST, float(attempt)))
        assert placed(mesh.show([candidate(incarnation=str(attempt + 1))], attempt + 0.5)) == {1: "a"}
    assert rejected(mesh.report_failed(1, 3, LOST, 3.0)) == {1: LOST}


def test_more_lost_requests_than_the_retry_budget_has_survive_a_restart() -> None:
    mesh = scheduler(candidate(slots=20))
    for key in range(20):
        mesh.submit(arrival(key), 0.0)
    for key in range(20):
        assert not rejected(mesh.report_failed(key, 1, LOST, 0.0))
    assert len(placed(mesh.show([candidate(slots=20, incarnation="2")], 2.0))) == 20


def test_requests_whose_loss_is_noticed_after_the_restart_are_placed_again() -> None:
    mesh = scheduler(candidate(slots=20))
    for key in range(20):
        mesh.submit(arrival(key), 0.0)
    mesh.show([candidate(slots=20, incarnation="2")], 2.0)
    for key in range(20):
        assert placed(mesh.report_failed(key, 1, LOST, 3.0)) == {key: "a"}


def test_request_that_waited_in_vain_for_a_lost_runner_learns_that_there_is_none() -> None:
    mesh = scheduler(candidate(), queue_timeout_seconds=5.0)
    mesh.submit(arrival(1), 0.0)
    mesh.report_failed(1, 1, UNREACHABLE, 0.0)
    assert placed(mesh.tick(4.9)) == {1: "a"}
    assert not rejected(mesh.report_failed(1, 2, UNREACHABLE, 4.9))
    refusal = refusals(mesh.tick(5.0))
    assert refusal[1].reason is Reason.NO_RUNNER_AVAILABLE
    assert refusal[1].retry_after_seconds == 5.0
    assert refusal[1].message == "no runner that serves m can be reached now; the request waited 5 s for one"


def test_deadline_of_a_request_that_waits_for_a_lost_runner_names_the_cause() -> None:
    mesh = scheduler(candidate())
    mesh.submit(arrival(1, deadline_at=3.0), 0.0)
    mesh.report_failed(1, 1, UNREACHABLE, 0.0)
    refusal = refusals(mesh.tick(3.0))[1]
    assert (refusal.reason, refusal.retry_after_seconds) == (Reason.DEADLINE_EXCEEDED, 5.0)
    assert "no runner that serves m can be reached" in refusal.message


def test_request_at_a_runner_that_is_down_is_refused_immediately() -> None:
    mesh = scheduler(candidate())
    mesh.submit(arrival(1), 0.0)
    mesh.show([candidate(readiness=Readiness.DOWN)], 0.5)
    assert rejected(mesh.report_failed(1, 1, UNREACHABLE, 1.0)) == {1: Reason.NO_RUNNER_AVAILABLE}


def test_unreachable_runner_is_left_for_another_one_and_not_excluded() -> None:
    mesh = scheduler(candidate("a", "m-a", pool="p"), candidate("b", "m-b", pool="p"))
    first = placed(mesh.submit(arrival(1, "p"), 0.0))[1]
    second = placed(mesh.report_failed(1, 1, UNREACHABLE, 0.0))[1]
    assert second != first
    assert not rejected(mesh.report_failed(1, 2, UNREACHABLE, 0.0))
    assert placed(mesh.tick(0.25)), "both are tried again"


def test_reached_runner_counts_as_there_again() -> None:
    mesh = scheduler(candidate(), queue_timeout_seconds=5.0)
    mesh.submit(arrival(1), 0.0)
    mesh.report_failed(1, 1, UNREACHABLE, 0.0)
    assert placed(mesh.tick(0.25)) == {1: "a"}
    mesh.report_first_content(1, 0.5)
    mesh.submit(arrival(2), 1.0)
    assert rejected(mesh.tick(6.0)) == {2: Reason.QUEUE_TIMEOUT}


def test_requests_wait_for_the_return_of_a_runner_that_was_lost_while_it_woke_their_model() -> None:
    """Fault: a kill -9 of the runner failed them with "m could not be woken: the connection was lost"."""
    mesh = scheduler(asleep(slots=2))
    for key in (1, 2):
        mesh.submit(arrival(key), 0.0)
    lost = mesh.wake_finished("m", failed("the connection was lost", LOST), 1.0)
    assert (rejected(lost), woken(lost)) == ({}, [])
    assert woken(mesh.tick(1.2)) == [], "it is called again after a pause"
    assert woken(mesh.tick(1.3)) == ["m"]
    assert not rejected(mesh.wake_finished("m", failed("no connection", UNREACHABLE), 1.3))
    assert woken(mesh.show([asleep(slots=2, incarnation="2")], 1.4)) == ["m"]
    mesh.wake_finished("m", None, 2.0)
    assert placed(mesh.show([candidate(slots=2, incarnation="2")], 2.0)) == {1: "a", 2: "a"}


def test_runner_that_cannot_be_connected_to_is_asked_to_wake_less_and_less_often_until_the_queue_timeout() -> None:
    mesh = scheduler(asleep(), queue_timeout_seconds=20.0)
    ended: dict[int, Reason] = {}
    decisions, wakes = mesh.submit(arrival(1), 0.0), 0
    for quarter in range(1, 101):
        if woken(decisions):
            wakes += 1
            assert not woken(mesh.wake_finished("m", failed("no connection", UNREACHABLE), quarter / 4))
        decisions = mesh.tick(quarter / 4)
        ended |= rejected(decisions)
        assert ended if quarter >= 80 else not ended
    assert ended == {1: Reason.NO_RUNNER_AVAILABLE}
    assert 10 <= wakes <= 14


def test_request_whose_runner_was_lost_three_times_while_it_woke_the_model_fails() -> None:
    """The load may be the cause."""
    mesh = scheduler(asleep())
    mesh.submit(arrival(1), 0.0)
    for attempt in (1, 2):
        assert not rejected(mesh.wake_finished("m", failed("the connection was lost", LOST), float(attempt)))
        assert woken(mesh.show([asleep(incarnation=str(attempt + 1))], attempt + 0.5)) == ["m"]
    assert rejected(mesh.wake_finished("m", failed("the connection was lost", LOST), 3.0)) == {1: Reason.WAKE_FAILED}


def test_requests_of_a_runner_lost_while_it_woke_their_model_go_to_another_one_immediately() -> None:
    mesh = scheduler(asleep("a", "m-a", pool="p"), asleep("b", "m-b", pool="p"))
    assert woken(mesh.submit(arrival(1, "p"), 0.0)) == ["m-a"]
    lost = mesh.wake_finished("m-a", failed("the connection was lost", LOST), 1.0)
    assert (rejected(lost), woken(lost)) == ({}, ["m-b"])


def test_requests_of_a_pool_whose_runners_were_lost_while_they_woke_their_models_wait_for_the_last_one() -> None:
    mesh = scheduler(asleep("a", "m-a", pool="p"), asleep("b", "m-b", pool="p"))
    mesh.submit(arrival(1, "p"), 0.0)
    mesh.wake_finished("m-a", failed("the connection was lost", LOST), 1.0)
    assert not rejected(mesh.wake_finished("m-b", failed("the connection was lost", LOST), 1.0))
    back = [asleep(name, f"m-{name}", pool="p", incarnation="2") for name in "ab"]
    assert woken(mesh.show(back, 2.0)) == ["m-b"]


def test_sleeping_models_of_a_pool_whose_runners_cannot_be_connected_to_are_tried_in_turn() -> None:
    mesh = scheduler(asleep("a", "m-a", pool="p"), asleep("b", "m-b", pool="p"))
    mesh.submit(arrival(1, "p"), 0.0)
    assert woken(mesh.wake_finished("m-a", failed("no connection", UNREACHABLE), 0.0)) == ["m-b"]
    assert (rejected(lost := mesh.wake_finished("m-b", failed("no connection", UNREACHABLE), 0.0)), woken(lost)) == (
        {},
        [],
    )
    assert len(woken(mesh.tick(0.25))) == 1


def test_request_for_an_adapter_waits_for_the_return_of_a_runner_that_was_lost_while_it_woke_the_base() -> None:
    mesh = scheduler(asleep(), asleep(model="tuned", base_model="m"))
    assert woken(mesh.submit(arrival(1, "tuned"), 0.0)) == ["m"]
    assert not rejected(mesh.wake_finished("m", failed("the connection was lost", LOST), 1.0))


def test_runner_that_does_not_return_fails_the_requests_that_waited_for_its_wake() -> None:
    mesh = scheduler(asleep())
    mesh.submit(arrival(1), 0.0)
    mesh.wake_finished("m", failed("the connection was lost", LOST), 1.0)
    assert rejected(mesh.show([asleep(readiness=Readiness.DOWN)], 2.0)) == {1: Reason.NO_RUNNER_AVAILABLE}
