"""Tool calls with invalid arguments in an answer: repaired, made again, and never delayed without need."""

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import pytest
from chat_stage import (
    LENGTH,
    SEARCH_SCHEMA,
    STOP,
    TOOL_CALLS,
    Event,
    ScriptedWork,
    answer_of_search,
    call,
    end,
    events_of,
    request,
    setup,
    text,
    tool_box,
    user,
)
from tool_call_corpus import TOOLS, rows
from typing_extensions import override

from runner_svc.backend.port import CallInfo
from runner_svc.chat.call_repair import MAX_HELD_CHARS
from runner_svc.chat.offered_tools import json_object
from runner_svc.chat.tool_loop import converse
from runner_svc.tools.argument_repair import is_object, repaired_arguments
from runner_svc.tools.schemas import ArgumentCheck
from weft.api.common.v1 import chat_pb2, event_pb2, receipt_pb2
from weft.dispatch.frames import Frame, GenerationPayload
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

BROKEN = "{'q': 'mesh',}"
HOPELESS = '{"q": "me'


def tool(name: str, schema: Mapping[str, Any]) -> chat_pb2.Tool:
    return chat_pb2.Tool(function=chat_pb2.FunctionTool(name=name, parameters=json_object(schema)))


def asked() -> chat_pb2.ChatPayload:
    return chat_pb2.ChatPayload(messages=[user()], tools=[tool("look", SEARCH_SCHEMA)])


def pieces(arguments: str, size: int = 3, index: int = 0, name: str = "look") -> list[Frame]:
    """A call in chunks, as engines stream it."""
    first = event_pb2.ToolCallDelta(index=index, id=f"call_{index}", name=name)
    parts = [arguments[at : at + size] for at in range(0, len(arguments), size)]
    deltas = [first, *(event_pb2.ToolCallDelta(index=index, arguments_text=part) for part in parts)]
    return [[Event(delta=event_pb2.Delta(tool_calls=[delta]))] for delta in deltas]


def arguments_of(events: Sequence[Event], index: int = 0) -> str:
    calls = [piece for event in events for piece in event.delta.tool_calls if piece.index == index]
    return "".join(piece.arguments_text for piece in calls)


def receipt_of(events: Sequence[Event]) -> receipt_pb2.Receipt:
    return events[-1].finished.receipt


async def frames_passed(work: ScriptedWork) -> list[Frame]:
    return [frame async for frame in converse(work, request(asked()), setup())]


async def test_valid_call_is_passed_on_unchanged_once_complete() -> None:
    work = ScriptedWork([*pieces('{ "q" : "me\\u0073h" }'), *end(TOOL_CALLS)])
    frames = await frames_passed(work)
    assert frames[0][0].delta.tool_calls[0].name == "look", "the name is passed on immediately"
    assert arguments_of(frames[1]) == '{ "q" : "me\\u0073h" }'
    assert frames[2][0].delta.finish_reason == TOOL_CALLS
    assert receipt_of(frames[-1]).repaired_call_count == 0


async def test_name_sent_with_the_first_arguments_is_passed_on_before_them() -> None:
    first = event_pb2.ToolCallDelta(id="call_0", name="look", arguments_text='{"q"')
    rest = event_pb2.ToolCallDelta(arguments_text=':"x"}')
    frames = [[Event(delta=event_pb2.Delta(tool_calls=[piece]))] for piece in (first, rest)]
    passed = await frames_passed(ScriptedWork([*frames, *end(TOOL_CALLS)]))
    assert [(piece.id, piece.name, piece.arguments_text) for piece in passed[0][0].delta.tool_calls] == [
        ("call_0", "look", "")
    ]
    assert arguments_of(passed[1]) == '{"q":"x"}'
    assert all(not piece.name for event in passed[1] for piece in event.delta.tool_calls)


async def test_every_valid_call_of_the_corpus_is_passed_on_unchanged() -> None:
    for row in rows("valid"):
        for size in (1, 7, 10_000):
            payload = chat_pb2.ChatPayload(messages=[user()], tools=[tool(row["tool"], TOOLS[row["tool"]])])
            work = ScriptedWork([*pieces(row["text"], size, name=row["tool"]), *end(TOOL_CALLS)])
            events = await events_of(work, request(payload))
            assert arguments_of(events) == row["text"]
            assert receipt_of(events).repaired_call_count == receipt_of(events).retried_call_count == 0


async def test_broken_call_is_repaired_and_counted() -> None:
    events = await events_of(ScriptedWork([*pieces(BROKEN), *end(TOOL_CALLS)]), request(asked()))
    assert json.loads(arguments_of(events)) == {"q": "mesh"}
    assert (receipt_of(events).repaired_call_count, receipt_of(events).retried_call_count) == (1, 0)


async def test_repaired_call_has_no_empty_pieces_of_arguments() -> None:
    events = await events_of(ScriptedWork([*pieces(BROKEN), *end(TOOL_CALLS)]), request(asked()))
    passed = [piece for event in events for piece in event.delta.tool_calls]
    assert [(bool(piece.name), bool(piece.arguments_text)) for piece in passed] == [(True, False), (False, True)]


async def test_text_after_a_complete_call_is_dropped() -> None:
    events = await events_of(ScriptedWork([*pieces('{"q":"x"}\n</tool_call>'), *end(TOOL_CALLS)]), request(asked()))
    assert arguments_of(events) == '{"q":"x"}'
    assert receipt_of(events).repaired_call_count == 1


async def test_call_that_cannot_be_repaired_is_made_again_with_its_tool_forced() -> None:
    work = ScriptedWork(
        [text("Looking."), *pieces(HOPELESS), *end(TOOL_CALLS, prompt=10, completion=5)],
        [text("Again."), *pieces('{"q":"mesh"}'), *end(STOP, prompt=12, completion=6)],
    )
    events = await events_of(work, request(asked()))
    assert arguments_of(events) == '{"q":"mesh"}'
    assert "".join(event.delta.text for event in events) == "Looking."
    assert work.payloads[1].tool_choice.function_name == "look"
    receipt = receipt_of(events)
    assert (receipt.repaired_call_count, receipt.retried_call_count) == (0, 1)
    assert (receipt.usage.prompt_tokens, receipt.usage.completion_tokens) == (22, 11)
    assert events[-2].usage == receipt.usage


async def test_call_is_made_again_only_once_and_then_passed_on_as_it_is() -> None:
    work = ScriptedWork([*pieces(HOPELESS), *end(TOOL_CALLS)], [*pieces('{"q":1}'), *end(TOOL_CALLS)])
    events = await events_of(work, request(asked()))
    assert arguments_of(events) == HOPELESS
    assert receipt_of(events).retried_call_count == 1
    assert len(work.payloads) == 2


@pytest.mark.parametrize("again", [[text("I cannot.")], pieces("{}", name="find")])
async def test_call_stays_as_it_is_if_the_engine_does_not_make_it_again(again: list[Frame]) -> None:
    """Arguments were made up: of a call without arguments, or of another tool."""
    payload = chat_pb2.ChatPayload(messages=[user()], tools=[tool("look", {"type": "object"})])
    work = ScriptedWork([*pieces(HOPELESS), *end(TOOL_CALLS)], [*again, *end(STOP)])
    events = await events_of(work, request(payload))
    assert arguments_of(events) == HOPELESS
    assert len(work.payloads) == 2


class FailingAgain(ScriptedWork):
    """An engine that fails at the end of its second turn."""

    @override
    async def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        async with aclosing(super().generate(payload, call)) as frames:
            async for frame in frames:
                yield frame
        if len(self.payloads) > 1:
            raise WeftError(Reason.BACKEND_ERROR, "out of memory")


@pytest.mark.parametrize(
    ("again", "tokens", "retried"), [([text("I"), text(" can")], 5 + 2, 1), ([], 5, 0)], ids=["begun", "not begun"]
)
async def test_tokens_of_a_second_attempt_that_fails_are_counted(again: list[Frame], tokens: int, retried: int) -> None:
    work = FailingAgain([*pieces(HOPELESS), *end(TOOL_CALLS, prompt=10, completion=5)], again)
    events = await events_of(work, request(asked()))
    assert arguments_of(events) == HOPELESS
    receipt = receipt_of(events)
    assert (receipt.usage.completion_tokens, receipt.retried_call_count) == (tokens, retried)
    assert (receipt.usage.prompt_tokens > 10) == bool(retried)
    assert events[-2].usage == receipt.usage


@pytest.mark.parametrize("broken", [BROKEN, HOPELESS])
async def test_call_in_a_cut_answer_is_not_repaired(broken: str) -> None:
    events = await events_of(ScriptedWork([*pieces(broken), *end(LENGTH)]), request(asked()))
    assert arguments_of(events) == broken


async def test_setting_disables_repairs() -> None:
    work = ScriptedWork([*pieces(BROKEN), *end(TOOL_CALLS)])
    events = await events_of(work, request(asked()), setup(tool_call_repair=False))
    assert arguments_of(events) == BROKEN
    assert receipt_of(events).repaired_call_count == 0


async def test_long_arguments_are_passed_on_before_they_are_complete() -> None:
    words = " ".join(map(str, range(2_000)))
    work = ScriptedWork([*pieces('{"q": "' + words + '", }', 40), *end(TOOL_CALLS)])
    passed = [arguments_of(frame) for frame in await frames_passed(work)]
    assert MAX_HELD_CHARS <= len(next(filter(None, passed))) < MAX_HELD_CHARS + 40
    assert len(list(filter(None, passed))) > 50
    assert json.loads("".join(passed)) == {"q": words}, "its end is repaired"


async def test_events_after_a_broken_call_keep_their_order() -> None:
    work = ScriptedWork([*pieces(BROKEN), *pieces('{"q":"b"}', index=1), text("Done."), *end(TOOL_CALLS)])
    events = await events_of(work, request(asked()))
    assert (json.loads(arguments_of(events)), arguments_of(events, 1)) == ({"q": "mesh"}, '{"q":"b"}')
    kinds = [[piece.index for piece in event.delta.tool_calls] or event.delta.text for event in events]
    assert kinds.index([1]) > max(at for at, kind in enumerate(kinds) if kind == [0])
    assert kinds.index("Done.") > max(at for at, kind in enumerate(kinds) if kind == [1])


async def test_broken_call_of_a_mesh_tool_is_repaired_and_run() -> None:
    work = ScriptedWork([*call("search", "{'q': 'mesh'}"), *end(TOOL_CALLS)], [text("Found."), *end()])
    events = await events_of(work, request(tools=["search"]), setup(tool_box(answer_of_search)))
    assert [event.tool_result.content for event in events if event.HasField("tool_result")] == ["found mesh"]
    assert receipt_of(events).repaired_call_count == 1


def repair(tool: str, text: str, passed: str = "") -> Any:
    found = repaired_arguments(ArgumentCheck(tool, TOOLS[tool]), text, passed)
    return None if found is None else json.loads(found)


def test_nine_of_ten_broken_calls_are_repaired_and_none_wrongly() -> None:
    broken = rows("broken")
    results = [(row, repair(row["tool"], row["text"])) for row in broken]
    repaired = [(row, found) for row, found in results if found is not None]
    assert [(row["text"], found) for row, found in repaired if found != row["expected"]] == []
    assert len(broken) >= 40
    assert len(repaired) >= 0.9 * len(broken)


def test_no_valid_call_of_the_corpus_counts_as_broken() -> None:
    valid = rows("valid")
    assert len(valid) >= 100
    assert [row["text"] for row in valid if not is_object(row["text"])] == []


@pytest.mark.parametrize(
    "text",
    [
        '{"q" 1}',
        '{"q": """mesh"""}',
        '{"q": "mesh", "limit": NaN}',
        '{"q": "mesh", "limit": 1e999}',
        '{"q": "mesh", "limit": "many",}',
        '{"limit": 1,}',
        '{"q": "\\ud83d",}',
        "{'q': {1, 2}}",
        "I cannot call it.",
        "[" * 5_000,
        '{"q": "' + "x" * 20_000,
    ],
    ids=lambda text: text[:24],
)
def test_text_that_would_lose_a_value_or_match_no_schema_is_not_repaired(text: str) -> None:
    assert repair("look", text) is None


def test_repair_begins_with_what_the_caller_has_received() -> None:
    assert repair("look", '{"q":"a","limit":1,}', '{"q":"a",') == {"q": "a", "limit": 1}
    assert repair("look", '{"q": "a"} Done.', '{"q": "a"}') == {"q": "a"}
    assert repair("look", "{ 'q': 'a' }", "{ ") is None
