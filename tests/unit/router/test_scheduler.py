"""The scheduler decides, stepped by hand."""

from typing import Any

import pytest
from scheduler_harness import Mesh, arrival, candidate, placed, plain, rejected, scheduler

from router_svc.policy.decisions import Loads, Served, Waits
from router_svc.policy.endpoints.candidates import Readiness
from router_svc.policy.pool_settings import ChoicePolicy, PoolSettings, Settings
from router_svc.policy.prompt_order import MAX_PASSED_OVER
from weft.dispatch.payload_description import prefix_digests
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation, Priority

SERVED = Served(prompt_tokens=2_250, cached_tokens=0, output_tokens=10)


def test_request_placed_again_after_router_loss_keeps_its_queue_position() -> None:
    mesh = scheduler(candidate())
    mesh.submit(arrival(1, arrived_at=10.0), 10.0)
    mesh.submit(arrival(2, arrived_at=11.0), 11.0)
    mesh.submit(arrival(3, arrived_at=2.0), 12.0)
    assert placed(mesh.finish(1, 13.0)) == {3: "a"}


def test_wait_status_has_position_and_reason_and_is_repeated_only_on_change() -> None:
    mesh = scheduler(candidate())
    mesh.submit(arrival(1), 0.0)
    assert plain(mesh.submit(arrival(2), 0.0)) == [Waits(key=2, position=1, reason="the slot of m is busy")]
    assert plain(mesh.submit(arrival(3), 0.0)) == [Waits(key=3, position=2, reason="the slot of m is busy")]
    assert mesh.tick(1.0) == []
    assert placed(mesh.finish(1, 1.5)) == {2: "a"}
    assert mesh.tick(1.75) == [], "nobody is told more than once per second"
    (word,) = mesh.tick(2.0)
    assert word == Waits(key=3, position=1, reason="the slot of m is busy", eta_seconds=word.eta_seconds)  # type: ignore[union-attr]  # it is a word about waiting, see left


def test_loading_model_is_waited_for_and_reported() -> None:
    mesh = scheduler(candidate(readiness=Readiness.LOADING, load_progress=0.4))
    assert mesh.submit(arrival(1), 0.0) == [Loads(key=1, stage="m loads on a", progress=0.4)]
    assert placed(mesh.show([candidate()], 5.0)) == {1: "a"}


def test_request_is_refused_exactly_at_the_queue_timeout() -> None:
    mesh = scheduler(candidate(), queue_timeout_seconds=30.0)
    mesh.submit(arrival(1), 0.0)
    mesh.submit(arrival(2, arrived_at=1.0), 1.0)
    assert rejected(mesh.tick(30.9)) == {}
    assert rejected(mesh.tick(31.0)) == {2: Reason.QUEUE_TIMEOUT}
    assert mesh.waiting == 0


@pytest.mark.parametrize(("limit", "words"), [(1.5, "in 1.5 s"), (30.0, "in 30 s")])
def test_queue_timeout_error_states_the_exact_wait(limit: float, words: str) -> None:
    mesh = scheduler(candidate(), queue_timeout_seconds=limit)
    mesh.submit(arrival(1), 0.0)
    mesh.submit(arrival(2), 0.0)
    (refused,) = mesh.tick(limit)
    assert refused.message.endswith(words)  # type: ignore[union-attr]  # it is a rejection, see above


def test_deadline_reached_in_the_queue_ends_the_request() -> None:
    mesh = scheduler(candidate())
    mesh.submit(arrival(1), 0.0)
    mesh.submit(arrival(2, deadline_at=3.0), 0.0)
    assert rejected(mesh.tick(3.0)) == {2: Reason.DEADLINE_EXCEEDED}


@pytest.mark.parametrize(
    ("members", "request_", "expected"),
    [
        ([], {}, Reason.MODEL_NOT_FOUND),
        (
            [candidate(operations=frozenset({Operation.CHAT}))],
            {"operation": Operation.EMBEDDING},
            Reason.UNSUPPORTED_OPERATION,
        ),
        ([candidate(remote=True)], {}, Reason.PERMISSION_DENIED),
        ([candidate(readiness=Readiness.DOWN)], {}, Reason.NO_RUNNER_AVAILABLE),
    ],
)
def test_unservable_request_is_refused_immediately(members: list, request_: dict, expected: Reason) -> None:  # type: ignore[type-arg]
    mesh = scheduler(*members)
    assert rejected(mesh.submit(arrival(1, **request_), 0.0)) == {1: expected}


def test_waiting_request_is_refused_when_the_last_runner_goes_down() -> None:
    mesh = scheduler(candidate())
    mesh.submit(arrival(1), 0.0)
    mesh.submit(arrival(2), 0.0)
    assert rejected(mesh.show([candidate(readiness=Readiness.DOWN)], 1.0)) == {2: Reason.NO_RUNNER_AVAILABLE}


def test_failed_attempt_is_retried_on_another_runner() -> None:
    mesh = scheduler(candidate("a", pool="p", model="m-a"), candidate("b", pool="p", model="m-b"))
    first = placed(mesh.submit(arrival(1, "p"), 0.0))[1]
    second = placed(mesh.report_failed(1, 1, Reason.SERVER_DIED, 0.1))[1]
    assert {first, second} == {"a", "b"}


def test_failed_attempt_without_another_runner_ends_the_request_with_its_reason() -> None:
    mesh = scheduler(candidate())
    mesh.submit(arrival(1), 0.0)
    assert rejected(mesh.report_failed(1, 1, Reason.SERVER_DIED, 0.1)) == {1: Reason.SERVER_DIED}
    assert mesh.running == 0


def test_refusal_of_the_request_itself_is_not_retried_elsewhere() -> None:
    mesh = scheduler(candidate("a", pool="p", model="m-a"), candidate("b", pool="p", model="m-b"))
    mesh.submit(arrival(1, "p"), 0.0)
    assert rejected(mesh.report_failed(1, 1, Reason.CONTEXT_LENGTH_EXCEEDED, 0.1)) == {
        1: Reason.CONTEXT_LENGTH_EXCEEDED
    }


def test_runner_without_a_tool_is_not_penalized_and_another_is_tried() -> None:
    mesh = scheduler(candidate("a", pool="p", model="m-a"), candidate("b", pool="p", model="m-b"))
    first = placed(mesh.submit(arrival(1, "p"), 0.0))[1]
    second = placed(mesh.report_failed(1, 1, Reason.TOOL_UNAVAILABLE, 0.1))[1]
    assert {first, second} == {"a", "b"}
    assert placed(mesh.submit(arrival(2, "p"), 0.1)) == {2: first}
    assert rejected(mesh.report_failed(1, 2, Reason.TOOL_UNAVAILABLE, 0.2)) == {1: Reason.TOOL_UNAVAILABLE}


def test_only_runner_with_a_tool_is_found_among_many_without_it() -> None:
    mesh = scheduler(*(candidate(name, pool="p", model=f"m-{name}") for name in "abcdef"), max_attempts=2)
    asked = [placed(mesh.submit(arrival(1, "p"), 0.0))[1]]
    asked += [placed(mesh.report_failed(1, attempt, Reason.TOOL_UNAVAILABLE, 0.1))[1] for attempt in range(1, 6)]
    assert sorted(asked) == list("abcdef")
    assert rejected(mesh.report_failed(1, 6, Reason.TOOL_UNAVAILABLE, 0.2)) == {1: Reason.TOOL_UNAVAILABLE}


def test_attempts_are_limited_even_if_more_runners_are_available() -> None:
    mesh = scheduler(*(candidate(name, pool="p", model=f"m-{name}") for name in "abcd"), max_attempts=2)
    mesh.submit(arrival(1, "p"), 0.0)
    assert placed(mesh.report_failed(1, 1, Reason.SERVER_DIED, 0.1))
    assert rejected(mesh.report_failed(1, 2, Reason.SERVER_DIED, 0.2)) == {1: Reason.SERVER_DIED}


def test_runner_full_with_external_requests_is_retried_until_the_queue_timeout() -> None:
    """A router that has just started knows nothing of the streams its runners still serve."""
    mesh = scheduler(candidate(), busy_pause_seconds=0.25, max_busy_pause_seconds=2.0, queue_timeout_seconds=30.0)
    mesh.submit(arrival(1), 0.0)
    asked, ended = [0.0], 0.0
    mesh.report_failed(1, 1, Reason.NO_SLOT_AVAILABLE, 0.0)
    for quarter in range(1, 4 * 60):
        decisions = mesh.tick(quarter / 4)
        if placed(decisions):
            asked.append(quarter / 4)
            decisions = mesh.report_failed(1, len(asked), Reason.NO_SLOT_AVAILABLE, quarter / 4)
        if rejected(decisions) == {1: Reason.QUEUE_TIMEOUT}:
            ended = quarter / 4
    assert ended == 30.0
    assert asked[:5] == [0.0, 0.25, 0.75, 1.75, 3.75]
    assert 15 <= len(asked) <= 20


LIMIT = Reason.RATE_LIMIT_EXCEEDED


def test_request_is_refused_at_once_if_a_providers_pause_is_longer_than_it_may_wait() -> None:
    """It waited 30 s, and was told to come again after 5 s, although the provider had said 120 s."""
    mesh = scheduler(candidate(), queue_timeout_seconds=30.0)
    mesh.submit(arrival(1), 0.0)
    assert rejected(mesh.report_failed(1, 1, LIMIT, 0.1, 120.0)) == {1: LIMIT}
    assert placed(mesh.submit(arrival(2), 0.2)) == {2: "a"}, "its runner says how long the pause still is"
    assert rejected(mesh.report_failed(2, 1, LIMIT, 0.3, 119.8)) == {2: LIMIT}


def test_request_waits_for_the_end_of_a_short_pause_of_a_provider() -> None:
    mesh = scheduler(candidate(), queue_timeout_seconds=30.0, busy_pause_seconds=1.0, max_busy_pause_seconds=1.0)
    mesh.submit(arrival(1), 0.0)
    assert not rejected(mesh.report_failed(1, 1, LIMIT, 0.0, 20.0))
    assert placed(mesh.tick(20.0)) == {1: "a"}
    assert rejected(mesh.report_failed(1, 2, LIMIT, 20.0, 20.0)) == {1: LIMIT}, "it has waited for 20 s of its 30 s"


def test_request_with_a_deadline_before_the_end_of_a_pause_is_refused_at_once() -> None:
    mesh = scheduler(candidate(), queue_timeout_seconds=30.0)
    mesh.submit(arrival(1, deadline_at=5.0), 0.0)
    assert rejected(mesh.report_failed(1, 1, LIMIT, 0.0, 10.0)) == {1: LIMIT}


def test_request_goes_to_another_provider_while_one_limits_requests() -> None:
    mesh = scheduler(*(candidate(name, pool="p", model=f"m-{name}") for name in "ab"))
    first = placed(mesh.submit(arrival(1, "p"), 0.0))[1]
    second = placed(mesh.report_failed(1, 1, LIMIT, 0.1, 120.0))[1]
    assert {first, second} == {"a", "b"}
    assert rejected(mesh.report_failed(1, 2, LIMIT, 0.2, 120.0)) == {1: LIMIT}


def test_task_is_not_kept_at_a_provider_with_a_long_pause() -> None:
    mesh = scheduler(candidate(), queue_timeout_seconds=30.0)
    mesh.submit(arrival(1, priority=Priority.DURABLE), 0.0)
    assert rejected(mesh.report_failed(1, 1, LIMIT, 0.1, 120.0)) == {1: LIMIT}


def test_content_from_a_runner_clears_its_busy_state() -> None:
    mesh = scheduler(candidate(slots=2), busy_pause_seconds=1.0)
    mesh.submit(arrival(1), 0.0)
    mesh.report_failed(1, 1, Reason.NO_SLOT_AVAILABLE, 0.0)
    assert placed(mesh.tick(1.0)) == {1: "a"}
    mesh.report_first_content(1, 1.5)
    mesh.submit(arrival(2), 2.0)
    mesh.report_failed(2, 1, Reason.NO_SLOT_AVAILABLE, 2.0)
    assert placed(mesh.tick(3.0)) == {2: "a"}


def test_bounces_are_limited() -> None:
    mesh = scheduler(candidate(), max_bounces=3, bounce_pause_seconds=0.0)
    mesh.submit(arrival(1), 0.0)
    outcomes = [rejected(mesh.report_failed(1, attempt, Reason.TICKET_INVALID, 0.0)) for attempt in range(1, 5)]
    assert outcomes == [{}, {}, {}, {1: Reason.TICKET_INVALID}]


def test_attempts_before_router_loss_affect_numbering_but_not_the_limit() -> None:
    mesh = scheduler(*(candidate(name, pool="p", model=f"m-{name}") for name in "ab"), max_attempts=2)
    mesh.submit(arrival(1, "p", attempts_used=5), 0.0)
    assert placed(mesh.report_failed(1, 6, Reason.SERVER_DIED, 0.1))


def test_late_report_of_an_earlier_attempt_is_ignored() -> None:
    mesh = scheduler(candidate("a", pool="p", model="m-a"), candidate("b", pool="p", model="m-b"))
    mesh.submit(arrival(1, "p"), 0.0)
    mesh.report_failed(1, 1, Reason.SERVER_DIED, 0.1)
    assert mesh.report_failed(1, 1, Reason.SERVER_DIED, 0.2) == []
    assert mesh.running == 1


@pytest.mark.parametrize(("first", "then"), [("p", "m-a"), ("m-a", "p")])
def test_requests_for_one_pool_share_its_queue_under_any_name(first: str, then: str) -> None:
    mesh = scheduler(candidate("a", pool="p", model="m-a"), queue_depth_per_runner=1)
    mesh.submit(arrival(1, first), 0.0)
    mesh.submit(arrival(2, first), 0.0)
    assert rejected(mesh.submit(arrival(3, then), 0.0)) == {3: Reason.QUEUE_FULL}


def test_runner_limit_counts_per_incarnation() -> None:
    mesh = scheduler(candidate("a", slots=4, runner_max_requests=1))
    mesh.submit(arrival(1), 0.0)
    mesh.submit(arrival(2), 0.0)
    back = candidate("a", slots=4, runner_max_requests=1, incarnation="2")
    assert placed(mesh.show([back], 1.0)) == {2: "a"}


def test_request_that_failed_everywhere_is_refused_when_its_last_candidate_leaves() -> None:
    mesh = scheduler(
        candidate("a", pool="p", model="m-a"), candidate("b", pool="p", model="m-b", readiness=Readiness.LOADING)
    )
    mesh.submit(arrival(1, "p"), 0.0)
    mesh.report_failed(1, 1, Reason.SERVER_DIED, 0.1)
    gone = [
        candidate("a", pool="p", model="m-a"),
        candidate("b", pool="p", model="m-b", readiness=Readiness.DOWN),
    ]
    assert rejected(mesh.show(gone, 0.2)) == {1: Reason.SERVER_DIED}


def _pair_with_cached_prompts() -> tuple[Mesh, str, list[dict[str, Any]]]:
    """Two runners of one slot, each of which runs a prompt; returns the runner of the first, and both prompts."""
    members = [candidate(name, f"m-{name}", pool="p", context_tokens=32_768) for name in "ab"]
    mesh = scheduler(*members, settings=Settings(default_pool=PoolSettings(policy=ChoicePolicy.FIRST_TOKEN)))
    prompts: list[dict[str, Any]] = [
        {"prompt_tokens": 2_250, "prefix_digests": prefix_digests([f"{word} " * 1_500], "")}
        for word in ("apple", "berry")
    ]
    first = placed(mesh.submit(arrival(1, "p", **prompts[0]), 0.0))[1]
    assert placed(mesh.submit(arrival(2, "p", **prompts[1]), 0.0))[2] != first
    return mesh, first, prompts


@pytest.mark.parametrize(
    ("deadline_at", "freed_at", "placed_first"),
    [(None, 1.0, 4), (601.0, 16.0, 4), (601.0, 16.1, 3), (21.0, 6.0, 4), (21.0, 6.1, 3)],
)
def test_freed_slot_goes_to_the_waiting_prompt_that_its_engine_has_cached(
    deadline_at: float | None, freed_at: float, placed_first: int
) -> None:
    """Every HTTP request has a deadline: those with one were never passed over, and lost their cached prompts."""
    mesh, first, prompts = _pair_with_cached_prompts()
    for key, prompt in ((3, prompts[1]), (4, prompts[0])):
        assert not placed(mesh.submit(arrival(key, "p", arrived_at=1.0, deadline_at=deadline_at, **prompt), 1.0))
    assert placed(mesh.finish(1, freed_at, SERVED)) == {placed_first: first}


def test_request_with_a_deadline_is_passed_over_a_limited_number_of_times() -> None:
    mesh, _, prompts = _pair_with_cached_prompts()
    mesh.submit(arrival(3, "p", arrived_at=1.0, deadline_at=601.0, **prompts[1]), 1.0)
    running, order = 1, []
    for key in range(4, 6 + MAX_PASSED_OVER):
        mesh.submit(arrival(key, "p", arrived_at=1.0, deadline_at=601.0, **prompts[0]), 1.0)
        (running,) = placed(mesh.finish(running, 1.0, SERVED))
        order.append(running)
    assert order == [*range(4, 4 + MAX_PASSED_OVER), 3, 4 + MAX_PASSED_OVER]
