"""Requests that every engine answers with an error: the request is what their failures have in common."""

import pytest
from scheduler_harness import Mesh, arrival, candidate, placed, rejected, scheduler

from router_svc.policy.decisions import Served
from router_svc.policy.limits import SchedulerLimits
from weft.kernel.errors.reasons import Reason

SOME = Served(prompt_tokens=10, cached_tokens=0, output_tokens=3)


def replicas(count: int, **limits: float) -> Mesh:
    mesh = Mesh(SchedulerLimits(**limits))  # type: ignore[arg-type]  # the fields' own types
    mesh.show([candidate(name, f"m-{name}", pool="m", slots=8) for name in "abcdefgh"[:count]], 0.0)
    return mesh


def fails_everywhere(mesh: Mesh, key: int, now: float, reason: Reason = Reason.BACKEND_ERROR) -> list[str]:
    """Where it was tried; it ends with `reason`."""
    where, attempt = [placed(mesh.submit(arrival(key, arrived_at=now), now))[key]], 1
    while True:
        decisions = mesh.report_failed(key, attempt, reason, now)
        if key in rejected(decisions):
            assert rejected(decisions)[key] is reason
            return where
        where.append(placed(decisions)[key])
        attempt += 1


def is_served(mesh: Mesh, key: int, now: float) -> str:
    where = placed(mesh.submit(arrival(key, arrived_at=now), now))[key]
    mesh.report_first_content(key, now)
    mesh.finish(key, now, SOME)
    return where


@pytest.mark.parametrize("reason", [Reason.BACKEND_ERROR, Reason.OUT_OF_MEMORY])
def test_request_failing_on_every_replica_does_not_delay_other_requests(reason: Reason) -> None:
    mesh = replicas(3)
    assert len(set(fails_everywhere(mesh, 1, 0.0, reason))) == 3
    assert {is_served(mesh, key, 0.1) for key in range(2, 5)} <= {"a", "b", "c"}


def test_no_replica_is_ejected_for_requests_that_fail_everywhere() -> None:
    mesh, key = replicas(2), 0
    for moment in range(40):
        fails_everywhere(mesh, key := key + 1, moment * 0.1)
        for _ in range(4):
            is_served(mesh, key := key + 1, moment * 0.1)
    running = {placed(mesh.submit(arrival(key := key + 1, arrived_at=4.0), 4.0))[key] for _ in range(8)}
    assert running == {"a", "b"}


def test_replicas_with_broken_connections_are_backed_off_except_the_last() -> None:
    mesh = replicas(3)
    last = fails_everywhere(mesh, 1, 0.0, Reason.SERVER_DIED)[-1]
    assert {is_served(mesh, key, 0.1) for key in range(2, 6)} == {last}


@pytest.mark.parametrize("replica_count", [1, 2, 3])
@pytest.mark.parametrize("reason", [Reason.BACKEND_ERROR, Reason.BACKEND_PROTOCOL_ERROR, Reason.SERVER_DIED])
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("is_varied", [False, True])
def test_always_failing_prompt_does_not_block_a_replica_for_other_callers(
    replica_count: int, reason: Reason, is_streamed: bool, is_varied: bool
) -> None:
    mesh, key, now = replicas(replica_count), 0, 0.0

    def fails() -> None:
        nonlocal key
        key += 1
        decisions = mesh.submit(arrival(key, arrived_at=now, prompt_digest=key if is_varied else 7), now)
        (where,) = placed(decisions).values()
        if is_streamed:
            mesh.report_first_content(key, now)
            mesh.finish(key, now, SOME, failure=reason)
            return
        for attempt in range(1, 4):
            decisions = mesh.report_failed(key, attempt, reason, now)
            if key in rejected(decisions):
                return
            (where,) = placed(decisions).values()
            assert where

    for _ in range(4):  # each replica fails once
        fails()
        now += 1.1
    for _ in range(30):  # nobody else is served meanwhile: no success excuses a failure
        now += 0.05
        fails()
        running = [placed(mesh.submit(arrival(key := key + 1, arrived_at=now), now))[key] for _ in range(replica_count)]
        assert len(set(running)) == replica_count
        for each in range(key - replica_count + 1, key + 1):
            mesh.finish(each, now)


def test_prompts_failing_on_all_replicas_block_none_for_other_callers() -> None:
    mesh, key = replicas(3), 0
    for moment in range(100):
        now = moment * 0.05
        key += 2
        fails_everywhere(mesh, key - 1, now)
        assert is_served(mesh, key, now)
    running = {placed(mesh.submit(arrival(key := key + 1, arrived_at=now), now))[key] for _ in range(3)}
    assert len(running) == 3


def test_prompt_answered_by_another_replica_excuses_no_failure() -> None:
    def paths(prompt_digest: int) -> list[list[str]]:
        """Where 40 requests were tried on three replicas of which two always fail."""
        mesh, found = replicas(3), []
        for key in range(1, 41):
            now, attempt = key * 0.1, 1
            where = placed(mesh.submit(arrival(key, arrived_at=now, prompt_digest=prompt_digest), now)).get(key, "")
            found.append([where])
            while where in {"a", "b"}:
                where = placed(mesh.report_failed(key, attempt, Reason.BACKEND_ERROR, now)).get(key, "")
                found[-1].append(where)
                attempt += 1
            mesh.report_first_content(key, now)
            mesh.finish(key, now, SOME)
        return found

    assert paths(prompt_digest=7) == paths(prompt_digest=0)


def test_last_unpaused_replica_gets_no_pause() -> None:
    mesh, key = replicas(3, max_attempts=1), 0
    for _ in range(3):
        key += 1
        placed(mesh.submit(arrival(key, arrived_at=0.0), 0.0))
        mesh.report_failed(key, 1, Reason.CONNECT_FAILED, 0.0)
    assert is_served(mesh, key + 1, 0.1)


def test_replicas_that_only_return_errors_are_soon_avoided_for_a_working_one() -> None:
    mesh, lost, now = replicas(5), 0, 0.0
    for key in range(1, 101):
        now += 0.1
        decisions = mesh.submit(arrival(key, arrived_at=now), now)
        for attempt in range(1, 4):
            if placed(decisions).get(key) in (None, "e"):
                break
            decisions = mesh.report_failed(key, attempt, Reason.BACKEND_ERROR, now)
        if placed(decisions).get(key) == "e":
            mesh.report_first_content(key, now)
            mesh.finish(key, now, SOME)
        else:
            lost += 1
    assert lost <= 4 * SchedulerLimits().max_shared_failures


def test_error_of_only_one_replica_counts_against_it() -> None:
    mesh = scheduler(candidate("a", "m-a", pool="m"), candidate("b", "m-b", pool="m"))
    broken = placed(mesh.submit(arrival(1), 0.0))[1]
    (other,) = placed(mesh.report_failed(1, 1, Reason.BACKEND_ERROR, 0.0)).values()
    mesh.report_first_content(1, 0.0)
    mesh.finish(1, 0.0, SOME)
    assert {is_served(mesh, key, 0.5) for key in range(2, 6)} == {other} != {broken}


def refused(mesh: Mesh, key: int, now: float) -> float:
    """When a request of one prompt that its engine calls itself busy for is rejected; others run meanwhile."""
    decisions, attempt = mesh.submit(arrival(key, arrived_at=now, prompt_digest=7), now), 0
    while key not in rejected(decisions):
        if key in placed(decisions):
            attempt += 1
            decisions = mesh.report_failed(key, attempt, Reason.BACKEND_NOT_READY, now)
            continue
        now += 0.25
        decisions = mesh.tick(now)
        other = 1_000 + int(now * 4)
        if placed(mesh.submit(arrival(other, arrived_at=now), now)):
            mesh.report_first_content(other, now)
            mesh.finish(other, now, SOME)
    return now


def test_busy_response_to_one_prompt_pauses_the_last_endpoint_for_that_request_only() -> None:
    mesh = replicas(1)
    ended = refused(mesh, 1, 0.0)
    assert ended > 1.0
    for key in range(2, 20):
        ended += 0.3
        assert refused(mesh, key, ended) == ended, "it is rejected at once"
        assert is_served(mesh, 100 + key, ended)
    assert refused(mesh, 50, ended + 61.0) > ended + 61.0


def test_engine_busy_for_all_prompts_is_waited_for_each_time() -> None:
    mesh, now = replicas(1), 0.0
    for key in range(1, 4):
        began = now
        decisions, attempt = mesh.submit(arrival(key, arrived_at=now, prompt_digest=7), now), 0
        while key not in rejected(decisions):
            if key in placed(decisions):
                attempt += 1
                decisions = mesh.report_failed(key, attempt, Reason.BACKEND_NOT_READY, now)
            else:
                now += 0.25
                decisions = mesh.tick(now)
        assert now - began > 1.0


PAUSE = 1.0


def two_runners() -> Mesh:
    return scheduler(candidate("a"), candidate("b", "m2", pool="m"))


def asks(mesh: Mesh, key: int, now: float) -> str:
    """Where the request runs; its answer has begun."""
    where = placed(mesh.submit(arrival(key, arrived_at=now), now))[key]
    mesh.report_first_content(key, now)
    return where


def test_runner_with_a_broken_answer_is_backed_off_briefly() -> None:
    mesh = two_runners()
    broken = asks(mesh, 1, 0.0)
    assert mesh.finish(1, 1.0, SOME, Reason.SERVER_DIED) == []
    for key in range(2, 12):
        assert asks(mesh, key, 1.1) != broken
        mesh.finish(key, 1.2, SOME)


def test_only_runner_is_not_paused_for_a_broken_answer() -> None:
    mesh = scheduler(candidate("a"))
    asks(mesh, 1, 0.0)
    mesh.finish(1, 1.0, SOME, Reason.SERVER_DIED)
    assert asks(mesh, 2, 1.0) == "a"


def test_runner_with_only_broken_answers_is_ejected() -> None:
    mesh = two_runners()
    broken, now, key = asks(mesh, 1, 0.0), 0.0, 1
    tried = 0
    for _ in range(60):
        if asks(mesh, key := key + 1, now) == broken:
            tried += 1
            mesh.finish(key, now, SOME, Reason.WORKER_LOST)
        else:
            mesh.finish(key, now, SOME)
        now += PAUSE / 2
    assert tried <= 8, "five in a row, and one each time that its ejection ends"


def test_cancelled_or_refused_request_does_not_count_against_the_runner() -> None:
    mesh = scheduler(candidate("a"))
    for key, reason in enumerate((Reason.CANCELLED, Reason.DEADLINE_EXCEEDED, Reason.REPEATED_LINE_LOOP), start=1):
        asks(mesh, key, 0.0)
        mesh.finish(key, 0.0, None, reason)
    assert asks(mesh, 9, 0.0) == "a"


def test_broken_answer_is_charged_for_its_generated_tokens() -> None:
    mesh = scheduler(candidate("a", slots=2))
    asks(mesh, 1, 0.0)
    mesh.finish(1, 1.0, SOME, Reason.SERVER_DIED)
    account = mesh._queues.shares._idle["default"]
    assert account.served - account.credit == SOME.prompt_tokens + SOME.output_tokens
