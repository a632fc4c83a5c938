"""Control signals: sent at once, recorded, and ending the answer where they ask for a decision."""

import json

import pytest
from chat_stage import (
    LENGTH,
    STOP,
    TOOL_CALLS,
    Event,
    ScriptedWork,
    answer,
    call,
    end,
    events_of,
    finish_reasons,
    kinds,
    receipt,
    request,
    setup,
    text,
    user,
    warnings,
)
from kit.failures import fails

from runner_svc.chat.offered_tools import MAX_SENT_DEPTH, json_object
from runner_svc.policy.signals import SignalSettings, reason_only, signal_catalogue
from weft.api.common.v1 import chat_pb2, event_pb2, receipt_pb2, signal_pb2, warning_pb2
from weft.api.runner.v1 import generation_service_pb2
from weft.kernel.errors.reasons import Reason

UNSURE = json.dumps({"reason": "old data"})
DECISION = json.dumps({"question": "Which?", "options": ["a", "b"]})
SEARCH = '{"q": "x"}'


def _signals(events: list[Event]) -> list[str]:
    return [event.signal.name for event in events if event.HasField("signal")]


async def test_signal_is_emitted_with_its_arguments_and_kept_in_record_and_receipt() -> None:
    work = ScriptedWork([text("Maybe 7."), *call("LOW_CONFIDENCE", UNSURE), *end(TOOL_CALLS)])
    events = await events_of(work, request(signals=["LOW_CONFIDENCE"]))
    assert kinds(events) == ["signal", "usage", "finished"]
    raised = next(event.signal for event in events if event.HasField("signal"))
    assert raised.arguments.fields[0].value.string_value == "old data"
    assert list(receipt(events).signals) == [raised] == work.record.signals
    assert finish_reasons(events) == [STOP]
    assert len(work.payloads) == 1, "a signal has no answer"


async def test_signal_is_emitted_as_soon_as_its_arguments_are_complete() -> None:
    work = ScriptedWork([*call("LOW_CONFIDENCE", UNSURE), text("Maybe 7."), *end()])
    events = await events_of(work, request(signals=["LOW_CONFIDENCE"]))
    places = [event.WhichOneof("event") for event in events]
    assert places.index("signal") < places.index("delta")


async def test_decision_request_ends_the_answer_and_stops_the_engine() -> None:
    work = ScriptedWork([text("Well."), *call("NEEDS_MANAGER_DECISION", DECISION), text("And on."), *end()])
    events = await events_of(work, request(signals=["NEEDS_MANAGER_DECISION"]))
    assert answer(events) == "Well."
    assert finish_reasons(events) == [STOP]
    assert work.closed_early == 1
    assert [signal.name for signal in receipt(events).signals] == ["NEEDS_MANAGER_DECISION"]
    assert receipt(events).usage.completion_tokens == 4, "what was seen of the turn counts"


async def test_agent_can_let_the_answer_continue_after_a_decision_request() -> None:
    work = ScriptedWork([*call("NEEDS_MANAGER_DECISION", DECISION), text("And on."), *end()])
    events = await events_of(work, request(signals=["NEEDS_MANAGER_DECISION"], stop_on_decision_request=False))
    assert answer(events) == "And on."
    assert work.closed_early == 0


async def test_tools_called_before_a_decision_request_are_not_run() -> None:
    pieces = [*call("search", SEARCH), *call("NEEDS_MANAGER_DECISION", DECISION, 1, "call_1")]
    work = ScriptedWork([*pieces, *end(TOOL_CALLS)])
    events = await events_of(work, request(tools=["search"], signals=["NEEDS_MANAGER_DECISION"]))
    assert warnings(events) == [warning_pb2.WARNING_CODE_TOOL_CALL_NOT_RUN]
    assert finish_reasons(events) == [STOP]


async def test_model_that_only_signals_is_prompted_once_more_for_its_answer() -> None:
    work = ScriptedWork([*call("LOW_CONFIDENCE", UNSURE), *end(TOOL_CALLS)], [text("Maybe 7."), *end()])
    events = await events_of(work, request(signals=["LOW_CONFIDENCE"]))
    assert answer(events) == "Maybe 7."
    assert work.payloads[1].messages[-1].role == chat_pb2.ROLE_TOOL
    assert work.payloads[1].messages[-1].content[0].text == "noted"


@pytest.mark.parametrize("blank", ["\n\n", " "])
async def test_blank_text_before_a_signal_is_not_an_answer(blank: str) -> None:
    work = ScriptedWork([text(blank), *call("LOW_CONFIDENCE", UNSURE), *end(TOOL_CALLS)], [text("Maybe 7."), *end()])
    events = await events_of(work, request(signals=["LOW_CONFIDENCE"]))
    assert answer(events) == f"{blank}Maybe 7."


@pytest.mark.parametrize("rest", ["}", " and so on", "\n"])
async def test_text_after_signal_arguments_is_not_part_of_the_conversation(rest: str) -> None:
    together = call("LOW_CONFIDENCE", f"{UNSURE}{rest}")
    apart = [*call("LOW_CONFIDENCE", UNSURE), call("", rest)[-1]]
    for pieces in (together, apart):
        work = ScriptedWork([*pieces, *end(TOOL_CALLS)], [text("Maybe 7."), *end()])
        events = await events_of(work, request(signals=["LOW_CONFIDENCE"]))
        assert _signals(events) == ["LOW_CONFIDENCE"]
        assert work.payloads[1].messages[-2].tool_calls[0].arguments_text == UNSURE


async def test_model_that_signals_again_instead_of_answering_is_finished() -> None:
    turn = [*call("LOW_CONFIDENCE", UNSURE), *end(TOOL_CALLS)]
    work = ScriptedWork(turn, turn)
    events = await events_of(work, request(signals=["LOW_CONFIDENCE"]))
    assert finish_reasons(events) == [STOP]
    assert _signals(events) == ["LOW_CONFIDENCE"] * 2


async def test_signal_beside_a_tool_call_is_recorded_and_the_tool_runs() -> None:
    pieces = [*call("LOW_CONFIDENCE", UNSURE), *call("search", SEARCH, 1, "call_1")]
    work = ScriptedWork([*pieces, *end(TOOL_CALLS)], [text("Done."), *end()])
    events = await events_of(work, request(tools=["search"], signals=["LOW_CONFIDENCE"]))
    assert kinds(events) == ["signal", "tool_call", "tool_result", "usage", "finished"]
    told = [part.content[0].text for part in work.payloads[1].messages if part.role == chat_pb2.ROLE_TOOL]
    assert told == ["noted", "found x"]


@pytest.mark.parametrize("arguments", ["{}", '{"reason": ""}', '{"reason": "x", "more": 1}', "{reason}"])
async def test_invalid_signal_arguments_end_the_request(arguments: str) -> None:
    work = ScriptedWork([*call("LOW_CONFIDENCE", arguments), *end(TOOL_CALLS)])
    with fails(Reason.TOOL_CALL_INVALID):
        await events_of(work, request(signals=["LOW_CONFIDENCE"]), setup(tool_call_repair=False))


async def test_signal_written_as_text_is_recognized() -> None:
    written = f'<tool_call>{{"name": "NEEDS_MANAGER_DECISION", "arguments": {DECISION}}}</tool_call>'
    work = ScriptedWork([text("Hm. "), text(written), text("On."), *end()])
    events = await events_of(work, request(signals=["NEEDS_MANAGER_DECISION"]))
    assert answer(events) == "Hm. "
    assert _signals(events) == ["NEEDS_MANAGER_DECISION"]


async def test_signal_truncated_by_the_token_limit_is_not_an_error() -> None:
    work = ScriptedWork([text("Hm."), *call("LOW_CONFIDENCE", '{"reas'), *end(LENGTH)])
    events = await events_of(work, request(signals=["LOW_CONFIDENCE"]))
    assert finish_reasons(events) == [LENGTH]
    assert not _signals(events)
    assert warnings(events) == [warning_pb2.WARNING_CODE_TOOL_CALL_NOT_RUN]


async def test_signals_of_any_length_are_emitted_and_stored_ones_are_bounded() -> None:
    own = SignalSettings(name="NOTE", description="x", parameters={"type": "object"})
    long = json.dumps({"text": "x" * 100_000})
    pieces = [piece for index in range(3) for piece in call("NOTE", long, index, f"call_{index}")]
    work = ScriptedWork([text("Hm."), *pieces, *end(TOOL_CALLS)])
    chat = setup(signals=signal_catalogue([own]), repetition="off")
    events = await events_of(work, request(signals=["NOTE"]), chat)
    assert _signals(events) == ["NOTE"] * 3
    assert len(receipt(events).signals) == len(work.record.signals) == 2


async def test_configured_signal_can_ask_for_a_decision() -> None:
    own = SignalSettings(name="NEEDS_LEGAL", description="x", parameters=reason_only(), asks_for_decision=True)
    work = ScriptedWork([*call("NEEDS_LEGAL", UNSURE), text("On."), *end()])
    chat = setup(signals=signal_catalogue([own]))
    events = await events_of(work, request(signals=["NEEDS_LEGAL"]), chat)
    assert _signals(events) == ["NEEDS_LEGAL"]
    assert work.closed_early == 1


async def test_caller_tool_calls_before_a_decision_request_are_returned() -> None:
    tool = chat_pb2.Tool(function=chat_pb2.FunctionTool(name="mine"))
    payload = chat_pb2.ChatPayload(messages=[user()], tools=[tool])
    pieces = [*call("mine"), *call("NEEDS_MANAGER_DECISION", DECISION, 1, "call_1")]
    events = await events_of(
        ScriptedWork([*pieces, *end(TOOL_CALLS)]), request(payload, signals=["NEEDS_MANAGER_DECISION"])
    )
    assert finish_reasons(events) == [event_pb2.FINISH_REASON_TOOL_CALLS]


def test_deepest_accepted_arguments_can_be_serialized() -> None:
    deep: dict[str, object] = {}
    for _ in range(MAX_SENT_DEPTH - 1):
        deep = {"a": deep}
    signal = signal_pb2.Signal(name="A", arguments=json_object(deep))
    finished = event_pb2.Finished(receipt=receipt_pb2.Receipt(signals=[signal]))
    sent = generation_service_pb2.GenerateResponse(events=[Event(finished=finished)])
    assert generation_service_pb2.GenerateResponse.FromString(sent.SerializeToString()) == sent
    with pytest.raises(ValueError, match="nested too deeply"):
        json_object({"a": deep})


def test_deepest_accepted_lists_can_be_serialized() -> None:
    deep: list[object] = []
    while True:
        try:
            arguments = json_object({"a": deep})
        except ValueError:
            break
        signal = signal_pb2.Signal(name="A", arguments=arguments)
        finished = event_pb2.Finished(receipt=receipt_pb2.Receipt(signals=[signal]))
        sent = generation_service_pb2.GenerateResponse(events=[Event(finished=finished)])
        assert generation_service_pb2.GenerateResponse.FromString(sent.SerializeToString()) == sent
        deep = [deep]
