"""The receipt says what happened."""

from dataclasses import replace

import pytest

from weft.api.common.v1 import event_pb2, receipt_pb2, usage_pb2
from weft.api.registry.v1.model_pb2 import ModelPrice
from weft.api.router.v1.placement_service_pb2 import Granted
from weft.dispatch.placement import for_load, in_queue
from weft.dispatch.request_receipt import MAX_TOOL_RUNS, RequestContext, RequestTrace
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation

CONTEXT = RequestContext(
    request_id="r1", tenant="t", model="pool", operation=Operation.CHAT, traceparent="00-" + "a" * 32 + "-b-01"
)
GRANT = Granted(runner="a", runner_incarnation="1", address="x", host="atlas", model="m-a", attempt=1)


def _seconds(duration: object) -> float:
    return duration.ToNanoseconds() / 1e9  # type: ignore[attr-defined,no-any-return]  # a protobuf Duration


def test_completed_request_has_separate_waits_attempts_and_runner_facts() -> None:
    journey = RequestTrace(CONTEXT, arrived=100.0)
    journey.note_waiting(in_queue(1, "busy"), 100.0)
    journey.note_waiting(for_load("loads"), 102.0)
    journey.note_waiting(for_load("loads more"), 104.0)
    journey.note_grant(GRANT, 107.0)
    journey.note_attempt_failed(WeftError(Reason.SERVER_DIED, "it died"), 103.5)
    journey.note_grant(Granted(runner="b", model="m-a", attempt=2), 107.5)
    journey.note_first_content(108.0)
    part = receipt_pb2.Receipt(usage=usage_pb2.Usage(completion_tokens=5), model_digest="sha256:x", host="titan")
    receipt = journey.receipt(Reason.UNSPECIFIED, part, 110.0)
    assert receipt.outcome == receipt_pb2.OUTCOME_COMPLETED
    assert _seconds(receipt.load_wait) == pytest.approx(5.0)
    assert _seconds(receipt.queue_wait) == pytest.approx(2.5)
    assert _seconds(receipt.time_to_first_token) == pytest.approx(8.0)
    assert [(attempt.runner, Reason(attempt.reason)) for attempt in receipt.attempts] == [
        ("a", Reason.SERVER_DIED),
        ("b", Reason.UNSPECIFIED),
    ]
    assert (receipt.model, receipt.host, receipt.usage.completion_tokens) == ("m-a", "titan", 5)


@pytest.mark.parametrize(("first_content", "kept"), [(104.0, True), (106.0, False)])
def test_receipt_says_whether_the_limit_of_the_wait_was_kept(first_content: float, kept: bool) -> None:
    journey = RequestTrace(replace(CONTEXT, max_wait_seconds=5.0), arrived=100.0)
    journey.note_grant(GRANT, 101.0)
    journey.note_first_content(first_content)
    promised = journey.receipt(Reason.UNSPECIFIED, None, 110.0).promised_wait
    assert (_seconds(promised.limit), promised.kept) == (5.0, kept)


def test_receipt_has_the_price_of_the_last_attempt_if_it_and_the_tokens_are_known() -> None:
    journey = RequestTrace(CONTEXT, arrived=100.0)
    journey.note_grant(GRANT, 101.0, remote=True, price=ModelPrice(completion_dollars=2.0))
    part = receipt_pb2.Receipt(usage=usage_pb2.Usage(completion_tokens=5))
    assert journey.receipt(Reason.UNSPECIFIED, part, 110.0).price_nanodollars == 10_000
    assert not journey.receipt(Reason.UNSPECIFIED, None, 110.0).HasField("price_nanodollars")
    journey.note_grant(GRANT, 102.0)
    assert not journey.receipt(Reason.UNSPECIFIED, part, 110.0).HasField("price_nanodollars")


def test_refused_request_was_promised_nothing() -> None:
    journey = RequestTrace(replace(CONTEXT, max_wait_seconds=5.0), arrived=100.0)
    assert not journey.receipt(Reason.DEADLINE_UNREACHABLE, None, 100.0).HasField("promised_wait")


@pytest.mark.parametrize("reason", [Reason.WAKE_FAILED, Reason.CANCELLED, Reason.DEADLINE_EXCEEDED])
def test_request_that_ends_while_its_model_wakes_waited_for_the_wake_and_not_in_queue(reason: Reason) -> None:
    journey = RequestTrace(CONTEXT, arrived=100.0)
    journey.note_waiting(in_queue(1, "busy"), 100.0)
    journey.note_waiting(for_load("wakes"), 102.0)
    receipt = journey.receipt(reason, None, 107.0)
    assert [_seconds(receipt.queue_wait), _seconds(receipt.load_wait)] == pytest.approx([2.0, 5.0])


def test_time_after_an_attempt_is_not_added_to_the_wait_before_it() -> None:
    journey = RequestTrace(CONTEXT, arrived=100.0)
    journey.note_grant(GRANT, 103.0)
    journey.note_attempt_failed(WeftError(Reason.SERVER_DIED, "it died"), 103.5)
    journey.note_waiting(for_load("wakes"), 104.0)
    receipt = journey.receipt(Reason.WAKE_FAILED, None, 110.0)
    assert [_seconds(receipt.queue_wait), _seconds(receipt.load_wait)] == pytest.approx([3.0, 6.0])


@pytest.mark.parametrize(
    ("reason", "granted", "outcome"),
    [
        (Reason.QUEUE_FULL, False, receipt_pb2.OUTCOME_REJECTED),
        (Reason.SERVER_DIED, True, receipt_pb2.OUTCOME_FAILED),
        (Reason.CANCELLED, True, receipt_pb2.OUTCOME_CANCELLED),
        (Reason.CANCELLED, False, receipt_pb2.OUTCOME_CANCELLED),
    ],
)
def test_incomplete_request_shows_if_a_runner_worked_on_it(reason: Reason, granted: bool, outcome: int) -> None:
    journey = RequestTrace(CONTEXT, arrived=0.0)
    if granted:
        journey.note_grant(GRANT, 1.0)
    receipt = journey.receipt(reason, None, 2.0)
    assert receipt.outcome == outcome
    assert Reason(receipt.reason) is reason
    assert receipt.request_id == "r1"
    assert receipt.model == ("m-a" if granted else "pool")


@pytest.mark.parametrize(
    ("remote", "attempt", "left"),
    [
        (True, Reason.UNSPECIFIED, True),
        (True, Reason.SERVER_DIED, True),
        (True, Reason.BACKEND_REJECTED, True),
        (True, Reason.CONNECT_FAILED, True),
        (True, Reason.TOOL_UNAVAILABLE, False),
        (True, Reason.NO_SLOT_AVAILABLE, False),
        (False, Reason.SERVER_DIED, False),
    ],
)
def test_receipt_without_runner_facts_shows_if_data_may_have_gone_to_a_remote_provider(
    remote: bool, attempt: Reason, left: bool
) -> None:
    journey = RequestTrace(CONTEXT, arrived=0.0)
    journey.note_grant(GRANT, 1.0, remote=remote)
    journey.note_attempt_failed(WeftError(attempt, ""), 1.0)
    assert journey.receipt(Reason.CANCELLED, None, 2.0).left_premises is left


def test_attempt_with_content_went_to_a_remote_provider_regardless_of_its_outcome() -> None:
    journey = RequestTrace(CONTEXT, arrived=0.0)
    journey.note_grant(GRANT, 1.0, remote=True)
    journey.note_first_content(1.5)
    journey.note_attempt_failed(WeftError(Reason.TOOL_UNAVAILABLE, ""), 1.0)
    assert journey.receipt(Reason.TOOL_UNAVAILABLE, None, 2.0).left_premises


def test_remote_tool_call_is_recorded_regardless_of_the_request_outcome() -> None:
    journey = RequestTrace(CONTEXT, arrived=0.0)
    journey.note_grant(GRANT, 1.0)
    journey.note_tools([event_pb2.InferenceEvent(tool_call=event_pb2.ToolCall(name="clock"))], 1.0)
    assert not journey.receipt(Reason.CANCELLED, None, 2.0).left_premises
    journey.note_tools([event_pb2.InferenceEvent(tool_call=event_pb2.ToolCall(name="web", remote=True))], 1.0)
    assert journey.receipt(Reason.CANCELLED, None, 2.0).left_premises


def test_receipt_has_the_times_of_the_first_tool_calls() -> None:
    journey = RequestTrace(CONTEXT, arrived=1.0)
    journey.note_grant(GRANT, 1.0)
    calls = [event_pb2.ToolCall(id=name, name=name) for name in ("clock", "web")]
    journey.note_tools([event_pb2.InferenceEvent(tool_call=call) for call in calls], 2.0)
    journey.note_tools([event_pb2.InferenceEvent(tool_result=event_pb2.ToolResult(id="web", failed=True))], 5.0)
    clock, web = journey.receipt(Reason.CANCELLED, None, 9.0).tool_runs
    assert (web.tool, web.start.seconds, web.duration.seconds, web.failed) == ("web", 1, 3, True)
    assert (clock.start.seconds, clock.HasField("duration"), clock.failed) == (1, False, False)
    journey.note_tools([event_pb2.InferenceEvent(tool_call=calls[0])] * MAX_TOOL_RUNS, 9.0)
    assert len(journey.receipt(Reason.CANCELLED, None, 9.0).tool_runs) == MAX_TOOL_RUNS


def test_receipt_says_how_the_conversation_was_compacted() -> None:
    done = receipt_pb2.Compaction(pass_count=1, usage=usage_pb2.Usage(prompt_tokens=900, completion_tokens=80))
    receipt = RequestTrace(replace(CONTEXT, compaction=done), arrived=0.0).receipt(Reason.UNSPECIFIED, None, 1.0)
    assert (receipt.compaction, receipt.usage.prompt_tokens) == (done, 0)
    plain = RequestTrace(CONTEXT, arrived=0.0).receipt(Reason.UNSPECIFIED, None, 1.0)
    assert not plain.HasField("compaction")


def test_receipt_lists_what_a_gateway_ran_before_and_that_it_left_the_mesh() -> None:
    search = receipt_pb2.ToolRun(tool="web_search", host="search.example", sent_byte_count=120, result_count=3)
    journey = RequestTrace(replace(CONTEXT, tool_runs=(search,) * MAX_TOOL_RUNS), arrived=0.0)
    journey.note_grant(GRANT, 1.0)
    journey.note_tools([event_pb2.InferenceEvent(tool_call=event_pb2.ToolCall(id="c", name="clock"))], 2.0)
    receipt = journey.receipt(Reason.UNSPECIFIED, None, 2.0)
    assert receipt.left_premises
    assert list(receipt.tool_runs) == [search] * MAX_TOOL_RUNS
