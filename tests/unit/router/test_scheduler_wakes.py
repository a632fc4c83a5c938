"""Sleeping models: one wake for all requests, in order, and a clear refusal when it fails. Hours in milliseconds."""

import pytest
from scheduler_harness import Mesh, arrival, asleep, candidate, failed, placed, plain, rejected, scheduler, woken

from router_svc.policy.decisions import Decision, Loads, Rejects, Waits, Wakes
from router_svc.policy.endpoints.candidates import Candidate, Readiness
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Priority


def told(decisions: list[Decision]) -> dict[int, Loads]:
    return {decision.key: decision for decision in decisions if isinstance(decision, Loads)}


def becomes(mesh: Mesh, now: float, *candidates: Candidate) -> list[Decision]:
    return mesh.show(candidates, now)


def wake_fully(mesh: Mesh, started_at: float, seconds: float) -> None:
    """One request wakes the model "m", is served, and the model falls asleep again."""
    mesh.submit(arrival(900, arrived_at=started_at), started_at)
    mesh.wake_finished("m", None, started_at + seconds)
    assert placed(becomes(mesh, started_at + seconds, candidate())) == {900: "a"}
    mesh.finish(900, started_at + seconds)
    becomes(mesh, started_at + seconds, asleep())


def test_first_request_starts_a_wake_shared_by_all_others() -> None:
    mesh = scheduler(asleep())
    first = mesh.submit(arrival(1), 0.0)
    assert first == [
        Wakes(model="m", runner="a", max_wait_seconds=60.0),
        Loads(key=1, stage="waking m on a (0 s of at most 60 s)", progress=None),
    ]
    others = [mesh.submit(arrival(key, arrived_at=float(key)), float(key)) for key in range(2, 8)]
    assert [woken(decisions) for decisions in others] == [[]] * 6
    assert told(others[-1])[7].stage == "waking m on a (7 s of at most 60 s)"


def test_model_is_woken_with_the_priority_of_its_request() -> None:
    first = scheduler(asleep()).submit(arrival(1, priority=Priority.HIGH), 0.0)
    assert first[0] == Wakes(model="m", runner="a", max_wait_seconds=60.0, priority=Priority.HIGH)


def test_requests_are_dispatched_in_order_when_the_model_is_ready() -> None:
    mesh = scheduler(asleep())
    for key in (1, 2, 3):
        mesh.submit(arrival(key, arrived_at=float(key)), float(key))
    assert mesh.wake_finished("m", None, 20.0) == []
    assert sorted(mesh.tick(20.0), key=lambda told: told.key) == told_only(20, 1, 2, 3)  # type: ignore[union-attr]  # they are about requests, see right
    served = list(placed(becomes(mesh, 21.0, candidate(slots=2))))
    served += list(placed(mesh.finish(1, 22.0)))
    assert served == [1, 2, 3]


def told_only(seconds: int, *keys: int) -> list[Decision]:
    stage = f"waking m on a ({seconds - 1} s of at most 60 s)"
    return [Loads(key=key, stage=stage, progress=None) for key in keys]


def test_failed_wake_rejects_all_waiting_requests_with_the_recipe_error() -> None:
    mesh = scheduler(asleep())
    for key in (1, 2, 3):
        mesh.submit(arrival(key), 0.0)
    decisions = mesh.wake_finished("m", failed("the recipe's request was answered with status 500"), 5.0)
    assert rejected(decisions) == dict.fromkeys((1, 2, 3), Reason.WAKE_FAILED)
    assert all("status 500" in decision.message for decision in decisions if isinstance(decision, Rejects))
    assert woken(decisions) == []
    assert mesh.waiting == 0


def test_next_request_after_a_failed_wake_wakes_again_immediately() -> None:
    mesh = scheduler(asleep())
    mesh.submit(arrival(1), 0.0)
    mesh.wake_finished("m", failed("no"), 5.0)
    assert woken(mesh.submit(arrival(2, arrived_at=5.0), 5.0)) == ["m"]


def test_waiting_requests_try_another_hibernating_member_after_a_failed_wake() -> None:
    mesh = scheduler(asleep("a", "m-a", pool="p", slots=2), asleep("b", "m-b", pool="p", slots=2))
    assert woken(mesh.submit(arrival(1, "p"), 0.0)) == ["m-a"]
    mesh.submit(arrival(2, "p"), 1.0)
    decisions = mesh.wake_finished("m-a", failed("no"), 2.0)
    assert woken(decisions) == ["m-b"]
    assert rejected(decisions) == {}
    assert rejected(mesh.wake_finished("m-b", failed("neither"), 3.0)) == dict.fromkeys((1, 2), Reason.WAKE_FAILED)


def test_failed_wakes_count_as_attempts() -> None:
    mesh = scheduler(*(asleep(name, f"m-{name}", pool="p") for name in "abcd"), max_attempts=2)
    mesh.submit(arrival(1, "p"), 0.0)
    assert woken(mesh.wake_finished("m-a", failed("no"), 1.0)) == ["m-b"]
    assert rejected(mesh.wake_finished("m-b", failed("no"), 2.0)) == {1: Reason.WAKE_FAILED}


def test_member_without_a_recently_failed_wake_is_preferred() -> None:
    members = (asleep("a", "m-a", pool="p"), asleep("b", "m-b", pool="p"))
    mesh = scheduler(*members, max_attempts=1)
    mesh.submit(arrival(1, "p"), 0.0)
    mesh.wake_finished("m-a", failed("no"), 1.0)
    assert woken(mesh.submit(arrival(2, "p"), 2.0)) == ["m-b"]


def test_loading_or_busy_member_is_waited_for_instead_of_waking_another() -> None:
    mesh = scheduler(asleep("a", "m-a", pool="p"), candidate("b", "m-b", pool="p", readiness=Readiness.LOADING))
    assert mesh.submit(arrival(1, "p"), 0.0) == [Loads(key=1, stage="m-b loads on b", progress=None)]
    decisions = becomes(mesh, 1.0, asleep("a", "m-a", pool="p"), candidate("b", "m-b", pool="p"))
    assert placed(decisions) == {1: "b"}
    assert plain(mesh.submit(arrival(2, "p"), 2.0)) == [Waits(key=2, position=1, reason="the slot of p is busy")]


def test_failed_attempt_wakes_a_hibernating_member() -> None:
    mesh = scheduler(asleep("a", "m-a", pool="p"), candidate("b", "m-b", pool="p"))
    mesh.submit(arrival(1, "p"), 0.0)
    assert woken(mesh.report_failed(1, 1, Reason.SERVER_DIED, 1.0)) == ["m-a"]


def test_hibernating_member_without_the_operation_is_not_woken() -> None:
    mesh = scheduler(asleep("a", "m-a", pool="p", operations=frozenset()), asleep("b", "m-b", pool="p", remote=True))
    assert rejected(mesh.submit(arrival(1, "p"), 0.0)) == {1: Reason.PERMISSION_DENIED}
    assert woken(mesh.submit(arrival(2, "p", allow_remote=True), 0.0)) == ["m-b"]


def test_queue_timeout_is_paused_during_a_wake_and_starts_at_its_end() -> None:
    mesh = scheduler(asleep(max_wake_seconds=3600.0), queue_timeout_seconds=30.0)
    mesh.submit(arrival(1), 0.0)
    mesh.submit(arrival(2, arrived_at=1.0), 1.0)
    for minute in range(1, 59):
        assert rejected(mesh.tick(60.0 * minute)) == {}
    mesh.wake_finished("m", None, 3500.0)
    assert placed(becomes(mesh, 3501.0, candidate())) == {1: "a"}
    assert rejected(mesh.tick(3530.9)) == {}
    assert rejected(mesh.tick(3531.0)) == {2: Reason.QUEUE_TIMEOUT}


def test_request_deadline_during_a_wake_ends_the_request_and_not_the_wake() -> None:
    mesh = scheduler(asleep())
    mesh.submit(arrival(1, deadline_at=10.0), 0.0)
    assert rejected(mesh.tick(10.0)) == {1: Reason.DEADLINE_EXCEEDED}
    assert woken(mesh.submit(arrival(2, arrived_at=11.0), 11.0)) == [], "the wake under way is shared"
    mesh.wake_finished("m", None, 12.0)
    assert placed(becomes(mesh, 12.0, candidate())) == {2: "a"}


def test_wake_continues_without_waiting_requests_and_no_other_is_started() -> None:
    mesh = scheduler(asleep("a", "m-a", pool="p"), asleep("b", "m-b", pool="p"))
    mesh.submit(arrival(1, "p"), 0.0)
    assert mesh.finish(1, 1.0) == []
    assert mesh.wake_finished("m-a", failed("no"), 2.0) == []


def test_queue_of_a_hibernating_model_is_bounded() -> None:
    mesh = scheduler(asleep(), queue_depth_per_runner=2)
    decisions = [mesh.submit(arrival(key), 0.0) for key in (1, 2, 3)]
    assert rejected(decisions[2]) == {3: Reason.QUEUE_FULL}


def test_woken_model_not_ready_after_the_settle_time_is_a_failed_wake() -> None:
    mesh = scheduler(asleep(), wake_settle_seconds=10.0)
    mesh.submit(arrival(1), 0.0)
    mesh.wake_finished("m", None, 5.0)
    assert rejected(mesh.tick(14.9)) == {}
    decisions = mesh.tick(15.0)
    assert rejected(decisions) == {1: Reason.WAKE_FAILED}
    assert any(isinstance(d, Rejects) and "woke but did not report ready" in d.message for d in decisions)


def test_self_reported_readiness_is_trusted_until_the_registry_reports_a_change() -> None:
    mesh = scheduler(asleep())
    mesh.submit(arrival(1), 0.0)
    assert placed(mesh.wake_finished("m", None, 5.0, self_reported=True)) == {1: "a"}
    mesh.finish(1, 6.0)
    assert placed(mesh.submit(arrival(2, arrived_at=3600.0), 3600.0)) == {2: "a"}
    mesh.finish(2, 3601.0)
    becomes(mesh, 3602.0, asleep(detail="idle"))
    assert woken(mesh.submit(arrival(3, arrived_at=3603.0), 3603.0)) == ["m"]


def test_self_reported_readiness_of_a_runner_that_is_down_is_ignored() -> None:
    mesh = scheduler(asleep())
    mesh.submit(arrival(1), 0.0)
    becomes(mesh, 1.0, candidate(readiness=Readiness.DOWN))
    assert placed(mesh.wake_finished("m", None, 5.0, self_reported=True)) == {}


def test_model_listed_as_ready_is_woken_after_repeated_not_ready_bounces() -> None:
    mesh = scheduler(candidate(runner_wakes=True, max_wake_seconds=60.0), stale_view_bounces=3)
    mesh.submit(arrival(1), 0.0)
    for attempt in (1, 2):
        assert woken(mesh.report_failed(1, attempt, Reason.BACKEND_NOT_READY, float(attempt))) == []
        assert placed(mesh.tick(attempt + 0.5)) == {1: "a"}
    decisions = mesh.report_failed(1, 3, Reason.BACKEND_NOT_READY, 3.0)
    assert Wakes(model="m", runner="a", max_wait_seconds=60.0, doubted=True) in decisions
    assert placed(mesh.wake_finished("m", None, 5.0, self_reported=True)) == {1: "a"}


@pytest.mark.parametrize(
    ("member", "reason"),
    [
        (candidate(runner_wakes=True), Reason.SHUTTING_DOWN),
        (candidate(runner_wakes=True), Reason.NO_SLOT_AVAILABLE),
        (candidate(), Reason.BACKEND_NOT_READY),
    ],
)
def test_other_bounces_do_not_wake_a_model(member: Candidate, reason: Reason) -> None:
    mesh = scheduler(member, stale_view_bounces=1)
    mesh.submit(arrival(1), 0.0)
    assert woken(mesh.report_failed(1, 1, reason, 1.0)) == []


def test_settle_time_elapsed_without_requests_does_not_delay_the_next_wake() -> None:
    mesh = scheduler(asleep(), wake_settle_seconds=10.0)
    mesh.submit(arrival(1), 0.0)
    mesh.finish(1, 1.0)
    mesh.wake_finished("m", None, 5.0)
    assert woken(mesh.submit(arrival(2, arrived_at=3600.0), 3600.0)) == ["m"]


def test_host_that_disappears_or_is_renamed_during_a_wake_keeps_the_same_wake() -> None:
    mesh = scheduler(asleep("", incarnation=""))
    first = mesh.submit(arrival(1), 0.0)
    assert told(first)[1].stage == "waking m (0 s of at most 60 s)"
    for now, state in (
        (1.0, candidate("", incarnation="", readiness=Readiness.DOWN)),
        (2.0, candidate("laptop", readiness=Readiness.LOADING)),
        (3.0, asleep("laptop")),
        (4.0, asleep("laptop", incarnation="2")),
    ):
        decisions = becomes(mesh, now, state)
        assert (woken(decisions), rejected(decisions)) == ([], {})
    mesh.wake_finished("m", None, 5.0)
    assert placed(becomes(mesh, 5.0, candidate("laptop", incarnation="2"))) == {1: "laptop"}


def test_request_arriving_when_the_woken_model_is_ready_is_placed_immediately() -> None:
    mesh = scheduler(asleep())
    mesh.submit(arrival(1), 0.0)
    assert placed(becomes(mesh, 5.0, candidate(slots=2))) == {1: "a"}
    assert placed(mesh.submit(arrival(2, arrived_at=6.0), 6.0)) == {2: "a"}
    assert mesh.wake_finished("m", None, 7.0) == []


def test_wake_progress_and_eta_are_estimated_only_from_the_last_wake() -> None:
    mesh = scheduler(asleep())
    assert told(mesh.submit(arrival(1), 0.0))[1].progress is None
    mesh.finish(1, 0.0)
    mesh.wake_finished("m", failed("no"), 1.0)
    wake_fully(mesh, started_at=100.0, seconds=20.0)
    assert told(mesh.submit(arrival(2, arrived_at=200.0), 200.0))[2].eta_seconds == 20.0
    half = told(mesh.tick(210.0))[2]
    assert half.progress == pytest.approx(0.5)
    assert half.eta_seconds == 10.0
    late = told(mesh.tick(225.0))[2]
    assert (late.progress, late.eta_seconds) == (0.95, None)


def test_wake_statuses_are_sent_at_most_once_per_second() -> None:
    mesh = scheduler(asleep())
    wake_fully(mesh, started_at=0.0, seconds=20.0)
    mesh.submit(arrival(1, arrived_at=100.0), 100.0)
    words = [told(mesh.tick(100.0 + quarter / 4)) for quarter in range(1, 41)]
    assert sum(map(bool, words)) == 10
    assert all(words[quarter] for quarter in range(3, 40, 4))


def test_deleted_model_refuses_waiting_requests_and_its_late_wake_end_is_ignored() -> None:
    mesh = scheduler(asleep())
    mesh.submit(arrival(1), 0.0)
    assert rejected(becomes(mesh, 1.0, candidate("b", "other"))) == {1: Reason.MODEL_NOT_FOUND}
    assert mesh.wake_finished("m", failed("it is not in the mesh any more"), 2.0) == []
    assert woken(becomes(mesh, 3.0, asleep())) == []
    assert woken(mesh.submit(arrival(2, arrived_at=3.0), 3.0)) == ["m"]
