"""Answers that break off after they have begun: nothing is tried again, and their runners are known by them."""

from scheduler_harness import Mesh, arrival, candidate, placed, scheduler

from router_svc.policy.decisions import Served
from weft.kernel.reasons import Reason

PAUSE = 1.0
SOME = Served(prompt_tokens=10, cached_tokens=0, output_tokens=3)


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
