"""The tool loop: requests to the engine, events for the caller, and usage."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from chat_stage import (
    LENGTH,
    STOP,
    TOOL_CALLS,
    Event,
    ScriptedTools,
    ScriptedWork,
    answer,
    call,
    end,
    events_of,
    finish_reasons,
    kinds,
    offered,
    receipt,
    request,
    setup,
    text,
    thought,
    tool_box,
    user,
    warnings,
)
from kit.failures import fails
from kit.running_record import running_record

from runner_svc.chat.tool_loop import converse
from runner_svc.request_records import RequestRecords, RequestState
from runner_svc.tools.port import ToolDescription
from runner_svc.tools.tool_box import ToolBox
from weft.api.common.v1 import chat_pb2, event_pb2, sampling_pb2, warning_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_testing.fake_clock import FakeClock

ASK = '{"q": "x"}'


def _with_caller_tool(name: str = "mine", **fields: Any) -> chat_pb2.ChatPayload:
    tool = chat_pb2.Tool(function=chat_pb2.FunctionTool(name=name))
    return chat_pb2.ChatPayload(messages=[user()], tools=[tool], **fields)


def _tool_calls(events: list[Event]) -> list[event_pb2.ToolCallDelta]:
    return [piece for event in events for piece in event.delta.tool_calls]


async def test_tool_is_run_and_the_model_answers_with_its_result() -> None:
    work = ScriptedWork(
        [thought("hm"), text("Let me see. "), *call("search", ASK), *end(TOOL_CALLS, cached=3)],
        [text("There it is."), *end(prompt=20, completion=15)],
    )
    events = await events_of(work, request(tools=["search"]))
    assert answer(events) == "Let me see. There it is."
    assert finish_reasons(events) == [STOP]
    assert kinds(events) == ["tool_call", "tool_result", "usage", "finished"]
    assert not _tool_calls(events), "a call of the mesh's own tool reached the caller"
    result = next(event.tool_result for event in events if event.HasField("tool_result"))
    assert (result.content, result.failed) == ("found x", False)
    spoken = work.payloads[1].messages
    assert [part.role for part in spoken] == [chat_pb2.ROLE_USER, chat_pb2.ROLE_ASSISTANT, chat_pb2.ROLE_TOOL]
    assert (spoken[1].content[0].text, spoken[1].reasoning) == ("Let me see. ", "hm")
    assert spoken[1].tool_calls[0].arguments_text == ASK
    assert spoken[2].tool_call_id == spoken[1].tool_calls[0].id == result.id
    assert spoken[2].content[0].text == "found x"


async def test_signed_or_redacted_reasoning_is_returned_to_the_provider_after_a_tool() -> None:
    sealed = [
        *[thought("Let me "), thought("see."), [Event(delta=event_pb2.Delta(reasoning_signature="s1"))]],
        [Event(delta=event_pb2.Delta(redacted_reasoning="xyz"))],
        *[thought("So."), [Event(delta=event_pb2.Delta(reasoning_signature="s2"))]],
    ]
    work = ScriptedWork([*sealed, *call("search", ASK), *end(TOOL_CALLS)], [text("There."), *end()])
    events = await events_of(work, request(tools=["search"]))
    assert list(work.payloads[1].messages[1].signed_reasoning) == [
        chat_pb2.SignedReasoning(text="Let me see.", signature="s1"),
        chat_pb2.SignedReasoning(redacted="xyz"),
        chat_pb2.SignedReasoning(text="So.", signature="s2"),
    ]
    assert [event.delta.reasoning_signature for event in events if event.delta.reasoning_signature] == ["s1", "s2"]


async def test_costs_are_summed_over_the_turns() -> None:
    work = ScriptedWork(
        [*call("search", ASK), *end(TOOL_CALLS, prompt=10, completion=5, cached=3)],
        [text("Done."), *end(prompt=20, completion=15, cached=10)],
    )
    found = receipt(await events_of(work, request(tools=["search"])))
    usage = found.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_prompt_tokens) == (30, 20, 13)
    assert found.gpu_time.ToMilliseconds() == 200
    assert found.tokens_per_second == pytest.approx(100.0)
    assert found.tool_run_count == 1


async def test_model_tools_need_no_agent() -> None:
    work = ScriptedWork([*call("files_read", ASK), *end(TOOL_CALLS)], [text("Done."), *end()])
    events = await events_of(work, request(), setup(tools=("files.read",)))
    assert offered(work.payloads[0]) == ["files_read"]
    assert next(event.tool_call.name for event in events if event.HasField("tool_call")) == "files.read"


async def test_record_shows_the_current_state_and_remaining_iterations() -> None:
    seen: list[tuple[RequestState, int | None]] = []

    async def look(_: Mapping[str, Any]) -> str:
        seen.append((work.record.state, work.record.tool_iterations_left))
        return "ok"

    work = ScriptedWork([text("One. "), *call("search", ASK), *end(TOOL_CALLS)], [text("Two."), *end()])
    await events_of(work, request(tools=["search"], max_tool_iterations=3), setup(tool_box(look)))
    assert seen == [(RequestState.RUNNING_TOOL, 3)]
    assert work.record.tool_iterations_left == 2
    assert work.record.output == "One. Two."


async def test_several_calls_of_a_turn_run_concurrently() -> None:
    both = asyncio.Barrier(2)

    async def meet(arguments: Mapping[str, Any]) -> str:
        await both.wait()
        return str(arguments["q"])

    work = ScriptedWork(
        [*call("search", '{"q": "a"}'), *call("search", '{"q": "b"}', 1, "call_1"), *end(TOOL_CALLS)],
        [text("Done."), *end()],
    )
    async with asyncio.timeout(5):
        events = await events_of(work, request(tools=["search"]), setup(tool_box(meet)))
    assert kinds(events)[:2] == ["tool_call", "tool_call"]
    results = [part.content[0].text for part in work.payloads[1].messages if part.role == chat_pb2.ROLE_TOOL]
    assert results == ["a", "b"]


async def test_calls_of_later_turns_get_their_own_ids() -> None:
    work = ScriptedWork(
        [*call("search", ASK), *end(TOOL_CALLS)], [*call("search", ASK), *end(TOOL_CALLS)], [text("Done."), *end()]
    )
    events = await events_of(work, request(tools=["search"]))
    ids = [event.tool_call.id for event in events if event.HasField("tool_call")]
    assert len(set(ids)) == 2


async def test_exhausted_budget_removes_the_tools_with_a_warning() -> None:
    work = ScriptedWork(
        [*call("search", ASK), *end(TOOL_CALLS)], [*call("search", ASK), *end(TOOL_CALLS)], [text("Done."), *end()]
    )
    events = await events_of(work, request(tools=["search"], max_tool_iterations=2))
    assert warnings(events) == [warning_pb2.WARNING_CODE_TOOL_BUDGET_EXHAUSTED]
    assert receipt(events).warnings[0].code == warning_pb2.WARNING_CODE_TOOL_BUDGET_EXHAUSTED
    assert work.payloads[1].tool_choice.mode == chat_pb2.ToolChoice.MODE_UNSPECIFIED
    assert work.payloads[2].tool_choice.mode == chat_pb2.ToolChoice.MODE_NONE
    assert work.record.tool_iterations_left == 0


async def test_caller_tools_remain_when_the_budget_is_exhausted() -> None:
    work = ScriptedWork([*call("search", ASK), *end(TOOL_CALLS)], [text("Done."), *end()])
    await events_of(work, request(_with_caller_tool(), tools=["search"], max_tool_iterations=1))
    assert offered(work.payloads[0]) == ["mine", "search"]
    assert offered(work.payloads[1]) == ["mine"]
    assert not work.payloads[1].HasField("tool_choice")


async def test_zero_budget_offers_no_tools() -> None:
    work = ScriptedWork([text("Hi."), *end()])
    await events_of(work, request(tools=["search"], max_tool_iterations=0))
    assert offered(work.payloads[0]) == []


@pytest.mark.parametrize("arguments", ["{q: 1}", "[1]", "{}", '{"q": 1}', '{"q": "x"'])
async def test_malformed_call_ends_the_request_before_any_tool_runs(arguments: str) -> None:
    ran: list[object] = []

    async def note(given: Mapping[str, Any]) -> str:
        ran.append(given)
        return ""

    work = ScriptedWork([*call("search", ASK), *call("search", arguments, 1, "call_1"), *end(TOOL_CALLS)])
    with fails(Reason.TOOL_CALL_INVALID):
        await events_of(work, request(tools=["search"]), setup(tool_box(note), tool_call_repair=False))
    assert not ran


@pytest.mark.parametrize(
    ("turns", "says"),
    [
        pytest.param(2 * [call("search", ASK)], "search", id="a call beyond the budget"),
        pytest.param(
            [call("search", ASK) + call("search", ASK, 1) + call("search", ASK, 2)],
            "more than 2 calls",
            id="too many calls in one turn",
        ),
        pytest.param(
            [call("search", '{"q": "x", "more": ' + "[" * 60 + "]" * 60 + "}")],
            "nested too deeply",
            id="deeply nested arguments",
        ),
    ],
)
async def test_call_outside_the_limits_is_an_error(turns: list[list[Any]], says: str) -> None:
    work = ScriptedWork(*([*turn, *end(TOOL_CALLS)] for turn in turns))
    with fails(Reason.TOOL_CALL_INVALID, match=says):
        await events_of(work, request(tools=["search"], max_tool_iterations=1), setup(max_tool_calls_per_turn=2))


async def test_call_of_an_unknown_function_is_an_error_without_caller_tools() -> None:
    work = ScriptedWork([*call("nothing"), *end(TOOL_CALLS)])
    with fails(Reason.TOOL_CALL_INVALID):
        await events_of(work, request(tools=["search"]))
    assert work.closed_early == 1


async def test_unnamed_call_chunk_after_the_finish_reason_is_a_call_error() -> None:
    nameless = event_pb2.ToolCallDelta(index=3, arguments_text="{}")
    finish, last = end(TOOL_CALLS)
    late = [event_pb2.InferenceEvent(delta=event_pb2.Delta(tool_calls=[nameless]))]
    work = ScriptedWork([*call("search", '{"q": "x"}'), finish, late, last])
    with fails(Reason.TOOL_CALL_INVALID, match="without naming it"):
        await events_of(work, request(tools=["search"]))


async def test_failing_tool_is_reported_to_the_model_and_the_chat_continues() -> None:
    async def fail(_: Mapping[str, Any]) -> str:
        raise RuntimeError("no disk")

    work = ScriptedWork([*call("search", ASK), *end(TOOL_CALLS)], [text("Sorry."), *end()])
    events = await events_of(work, request(tools=["search"]), setup(tool_box(fail)))
    assert next(event.tool_result.failed for event in events if event.HasField("tool_result"))
    assert "no disk" in work.payloads[1].messages[-1].content[0].text


async def test_truncated_output_is_reported_to_the_model_and_the_caller() -> None:
    async def flood(_: Mapping[str, Any]) -> str:
        return "x" * 5000

    work = ScriptedWork([*call("search", ASK), *end(TOOL_CALLS)], [text("Long."), *end()])
    box = tool_box(flood, max_output_bytes=300)
    events = await events_of(work, request(tools=["search"]), setup(box))
    assert warnings(events) == [warning_pb2.WARNING_CODE_TOOL_OUTPUT_CUT]
    assert "[cut: 4700 bytes more]" in work.payloads[1].messages[-1].content[0].text


async def test_event_of_a_long_result_is_bounded_and_marked() -> None:
    async def flood(_: Mapping[str, Any]) -> str:
        return "x" * 200_000

    work = ScriptedWork([*call("search", ASK), *end(TOOL_CALLS)], [text("Long."), *end()])
    events = await events_of(work, request(tools=["search"]), setup(tool_box(flood, max_output_bytes=1_000_000)))
    told = next(event.tool_result.content for event in events if event.HasField("tool_result"))
    assert len(told) < 70_000
    assert told.endswith("[cut: the model received 200000 characters]")
    assert len(work.payloads[1].messages[-1].content[0].text) == 200_000


async def test_caller_tool_call_is_streamed_to_the_caller() -> None:
    work = ScriptedWork([*call("mine", '{"a": 1}'), *end(TOOL_CALLS)])
    events = await events_of(work, request(_with_caller_tool(), tools=["search"]))
    pieces = _tool_calls(events)
    assert (pieces[0].name, pieces[0].id) == ("mine", "call_0")
    assert len(pieces) == 3
    assert "".join(piece.arguments_text for piece in pieces) == '{"a": 1}'
    assert finish_reasons(events) == [TOOL_CALLS]


async def test_answer_without_calls_never_ends_with_tool_calls() -> None:
    work = ScriptedWork([text("Hi."), *end(TOOL_CALLS)])
    assert finish_reasons(await events_of(work, request(tools=["search"]))) == [STOP]


async def test_mixed_turn_returns_caller_calls_and_warns_about_those_not_run() -> None:
    work = ScriptedWork([*call("search", ASK), *call("mine", "{}", 1, "call_1"), *end(TOOL_CALLS)])
    events = await events_of(work, request(_with_caller_tool(), tools=["search"]))
    assert {(piece.index, piece.name) for piece in _tool_calls(events) if piece.name} == {(0, "mine")}
    assert warnings(events) == [warning_pb2.WARNING_CODE_TOOL_CALL_NOT_RUN]
    assert finish_reasons(events) == [TOOL_CALLS]
    assert receipt(events).tool_run_count == 0


async def test_turn_truncated_by_the_token_limit_runs_no_tools() -> None:
    work = ScriptedWork([*call("search", '{"q": '), *end(LENGTH)])
    events = await events_of(work, request(tools=["search"]))
    assert finish_reasons(events) == [LENGTH]
    assert warnings(events) == [warning_pb2.WARNING_CODE_TOOL_CALL_NOT_RUN]


async def test_caller_token_limit_applies_to_all_turns_together() -> None:
    payload = chat_pb2.ChatPayload(messages=[user()], sampling=sampling_pb2.SamplingParams(max_tokens=12))
    work = ScriptedWork(
        [*call("search", ASK), *end(TOOL_CALLS, completion=5)], [*call("search", ASK), *end(TOOL_CALLS, completion=7)]
    )
    events = await events_of(work, request(payload, tools=["search"]))
    assert [asked.sampling.max_tokens for asked in work.payloads] == [12, 7]
    assert finish_reasons(events) == [LENGTH]
    assert receipt(events).tool_run_count == 1


async def test_call_written_as_text_is_run_and_hidden() -> None:
    written = f'<tool_call>{{"name": "search", "arguments": {ASK}}}</tool_call>'
    pieces = [text(written[at : at + 7]) for at in range(0, len(written), 7)]
    work = ScriptedWork([text("So: "), *pieces, *end()], [text("Done."), *end()])
    events = await events_of(work, request(tools=["search"]))
    assert answer(events) == "So: Done."
    assert receipt(events).tool_run_count == 1
    said = work.payloads[1].messages[1]
    assert (said.content[0].text, said.tool_calls[0].name) == ("So: ", "search")
    assert json.loads(said.tool_calls[0].arguments_text) == {"q": "x"}


async def test_caller_tool_call_written_as_text_is_returned_to_the_caller() -> None:
    work = ScriptedWork([text('<tool_call>{"name": "mine", "arguments": {}}</tool_call>'), *end()])
    events = await events_of(work, request(_with_caller_tool(), tools=["search"]))
    assert [(piece.name, piece.arguments_text) for piece in _tool_calls(events)] == [("mine", "{}")]
    assert finish_reasons(events) == [TOOL_CALLS]


async def test_text_calls_stay_text_if_the_agent_disables_parsing() -> None:
    written = f'<tool_call>{{"name": "search", "arguments": {ASK}}}</tool_call>'
    work = ScriptedWork([text(written), *end()])
    events = await events_of(work, request(tools=["search"], parse_text_tool_calls=False))
    assert answer(events) == written


async def test_logprobs_of_a_text_call_are_not_part_of_the_answer() -> None:
    def token(piece: str) -> list[Event]:
        logprob = event_pb2.TokenLogprob(token=piece)
        return [Event(delta=event_pb2.Delta(text=piece, logprobs=[logprob]))]

    work = ScriptedWork(
        [token("Hi <"), token('tool_call>{"name": "search", '), token(f'"arguments": {ASK}}}</tool_call>'), *end()],
        [token("Done."), *end()],
    )
    events = await events_of(work, request(tools=["search"]))
    assert answer(events) == "Hi Done."
    assert [entry.token for event in events for entry in event.delta.logprobs] == ["Done."]


@pytest.mark.parametrize("behaviour", [{"tools": ["weather"]}, {"signals": ["NO_SUCH"]}])
async def test_missing_tools_are_detected_before_generation(behaviour: dict[str, Any]) -> None:
    work = ScriptedWork()
    with fails(Reason.TOOL_UNAVAILABLE):
        await events_of(work, request(**behaviour))
    assert not work.payloads


@pytest.mark.parametrize(
    ("payload", "behaviour", "field"),
    [
        (_with_caller_tool("search"), {"tools": ["search"]}, "tools[0].function.name"),
        (_with_caller_tool("LOW_CONFIDENCE"), {"signals": ["LOW_CONFIDENCE"]}, "tools[0].function.name"),
        (chat_pb2.ChatPayload(messages=[user()], choice_count=2), {"tools": ["search"]}, "choice_count"),
        (None, {"max_tool_iterations": 65}, "behaviour.max_tool_iterations"),
    ],
)
async def test_invalid_behavior_is_refused_with_its_field(
    payload: chat_pb2.ChatPayload | None, behaviour: dict[str, Any], field: str
) -> None:
    with fails(field=field):
        await events_of(ScriptedWork(), request(payload, **behaviour))


async def test_caller_without_tool_calls_gets_no_mesh_tool_calls_either() -> None:
    choice = chat_pb2.ToolChoice(mode=chat_pb2.ToolChoice.MODE_NONE)
    work = ScriptedWork([text("Hi."), *end()])
    await events_of(work, request(_with_caller_tool(tool_choice=choice), tools=["search"], signals=["LOW_CONFIDENCE"]))
    assert offered(work.payloads[0]) == ["mine"]


async def test_required_call_is_required_only_once() -> None:
    choice = chat_pb2.ToolChoice(mode=chat_pb2.ToolChoice.MODE_REQUIRED)
    payload = chat_pb2.ChatPayload(messages=[user()], tool_choice=choice)
    work = ScriptedWork([*call("search", ASK), *end(TOOL_CALLS)], [text("Done."), *end()])
    await events_of(work, request(payload, tools=["search"]))
    modes = [asked.tool_choice.mode for asked in work.payloads]
    assert modes == [chat_pb2.ToolChoice.MODE_REQUIRED, chat_pb2.ToolChoice.MODE_AUTO]


class HangingTool:
    def __init__(self) -> None:
        self.started, self.cancelled = asyncio.Event(), asyncio.Event()

    async def __call__(self, _: Mapping[str, Any]) -> str:
        self.started.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()
        return ""


async def test_external_cancellation_ends_a_running_tool() -> None:
    tool = HangingTool()
    records = RequestRecords("m", FakeClock())

    async def ask() -> None:
        with running_record(records, "req-1") as record:
            work = ScriptedWork([*call("search", ASK), *end(TOOL_CALLS)])
            work.record = record
            await events_of(work, request(tools=["search"]), setup(tool_box(tool)))

    asking = asyncio.create_task(ask())
    await tool.started.wait()
    records.fail_all(WeftError(Reason.WORKER_RESTARTED, "restarted"))
    with pytest.raises(WeftError, match="restarted"):
        await asking
    assert tool.cancelled.is_set()


async def test_first_content_is_sent_separately_even_if_text_was_held_back() -> None:
    late = [Event(delta=event_pb2.Delta(text=piece)) for piece in ("ox", " and", " on")]
    work = ScriptedWork([text("<tool"), text("b"), late, *end()])
    frames = [frame async for frame in converse(work, request(tools=["search"]), setup())]
    assert [[event.delta.text for event in frame] for frame in frames[:2]] == [["<toolb"], ["ox", " and", " on"]]
    work = ScriptedWork([text("<tool"), late, *end()])
    frames = [frame async for frame in converse(work, request(tools=["search"]), setup())]
    assert [[event.delta.text for event in frame] for frame in frames[:2]] == [["<toolox"], [" and", " on"]]


async def test_closing_the_answer_mid_turn_closes_the_engine_stream() -> None:
    work = ScriptedWork([text("a"), text("b"), text("c"), *end()])
    frames = converse(work, request(tools=["search"]), setup())
    await anext(frames)
    await frames.aclose()
    assert work.closed_early == 1


def _remote_box() -> ToolBox:
    description = ToolDescription(name="web", description="Looks it up.", parameters={"type": "object"})
    return ToolBox([ScriptedTools(_nothing_found, description, "web", remote=True)])


async def _nothing_found(_: Mapping[str, Any]) -> str:
    return "nothing"


async def test_remote_tool_is_refused_for_a_request_without_remote_permission() -> None:
    work = ScriptedWork()
    with fails(Reason.PERMISSION_DENIED, match="the tool web is remote"):
        await events_of(work, request(tools=["web"]), setup(_remote_box()))
    assert work.payloads == [], "nothing was generated"


async def test_remote_tool_call_is_reported_and_recorded() -> None:
    work = ScriptedWork([*call("web", ASK), *end(TOOL_CALLS)], [text("done"), *end()])
    events = await events_of(work, replace(request(tools=["web"]), allow_remote=True), setup(_remote_box()))
    assert [event.tool_call.remote for event in events if event.HasField("tool_call")] == [True]
    assert work.record.left_premises


async def test_uncalled_remote_tool_is_not_recorded_as_remote() -> None:
    work = ScriptedWork([text("no need"), *end()])
    await events_of(work, replace(request(tools=["web"]), allow_remote=True), setup(_remote_box()))
    assert not work.record.left_premises


async def test_joined_texts_of_a_turn_with_tools_reach_the_caller_separately() -> None:
    joined = Event(delta=event_pb2.Delta(text="Let me see.", piece_lengths=[3, 3, 5]))
    turns = [[joined], *call("search", ASK), *end(TOOL_CALLS)], [[joined], *end(prompt=20, completion=15)]
    events = await events_of(ScriptedWork(*turns), request(tools=["search"]))
    texts = [event.delta.text for event in events if event.delta.text]
    assert texts == ["Let", " me", " see."] * 2
    assert not any(event.delta.piece_lengths for event in events)
