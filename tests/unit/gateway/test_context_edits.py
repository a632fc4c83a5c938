"""Edits of conversations: which tool results and thinking are removed, and what the answer says of it."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from gateway.anthropic.context_edits import ContextEdits, compaction_plan, edited
from weft.api.common.v1 import chat_pb2
from weft.dispatch.payload_description import estimated_prompt_tokens

USER, ASSISTANT, TOOL = chat_pb2.ROLE_USER, chat_pb2.ROLE_ASSISTANT, chat_pb2.ROLE_TOOL
TOOLS, THINKING, COMPACT = "clear_tool_uses_20250919", "clear_thinking_20251015", "compact_20260112"
CLEARED = "[This old tool result was cleared to save context.]"
_model = TypeAdapter(ContextEdits)


def management(*edits: dict[str, Any]) -> ContextEdits:
    return _model.validate_python({"edits": list(edits)})


def chat_of(*names: str) -> chat_pb2.ChatPayload:
    """A user message, and for each name a call with thinking, and its result of about 100 tokens."""
    chat = chat_pb2.ChatPayload()
    chat.messages.add(role=USER).content.add(text="Work")
    for index, name in enumerate(names):
        said = chat.messages.add(role=ASSISTANT, reasoning=f"think {index}")
        said.tool_calls.add(id=f"c{index}", name=name, arguments_text='{"a":1}')
        chat.messages.add(role=TOOL, tool_call_id=f"c{index}").content.add(text=f"{index}" * 400)
    return chat


def done(chat: chat_pb2.ChatPayload, *edits: dict[str, Any], tokens: int | None = None) -> Any:
    """The cleared results, and what was applied."""
    before = chat.SerializeToString()
    expected = estimated_prompt_tokens(chat) if tokens is None else tokens
    short, applied = edited(chat, management(*edits).edits or (), expected)
    assert chat.SerializeToString() == before
    results = [each.content[0].text for each in short.messages if each.role == TOOL]
    return [index for index, text in enumerate(results) if text == CLEARED], applied, short


def at(value: int, kind: str = "input_tokens") -> dict[str, Any]:
    return {"type": kind, "value": value}


def test_oldest_results_are_cleared_above_the_trigger() -> None:
    cleared, (applied,), short = done(chat_of("a", "b", "c", "d", "e"), {"type": TOOLS, "trigger": at(100)})
    assert (cleared, applied["type"], applied["cleared_tool_uses"]) == ([0, 1], TOOLS, 2)
    assert 150 < applied["cleared_input_tokens"] < 200
    assert [call.arguments_text for each in short.messages for call in each.tool_calls] == ['{"a":1}'] * 5
    assert done(chat_of("a", "b", "c", "d", "e"), {"type": TOOLS})[:2] == ([], [])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"trigger": at(5, "tool_uses")}, []),
        ({"trigger": at(4, "tool_uses")}, [0, 1]),
        ({"trigger": at(4, "tool_uses"), "keep": at(1, "tool_uses")}, [0, 1, 2, 3]),
        ({"trigger": at(0, "tool_uses"), "keep": at(0, "tool_uses")}, [0, 1, 2, 3, 4]),
        ({"trigger": at(0), "exclude_tools": ["a", "x"]}, [1]),
        ({"trigger": at(0), "clear_at_least": at(150)}, [0, 1]),
        ({"trigger": at(0), "clear_at_least": at(300)}, []),
    ],
)
def test_parameters_decide_which_results_are_cleared(fields: dict[str, Any], expected: list[int]) -> None:
    assert done(chat_of("a", "b", "c", "d", "e"), {"type": TOOLS, **fields})[0] == expected


@pytest.mark.parametrize(("inputs", "left"), [(True, 3), (["b"], 4), (False, 5), (None, 5)])
def test_inputs_are_cleared_on_request(inputs: object, left: int) -> None:
    _, _, short = done(chat_of("a", "b", "c", "d", "e"), {"type": TOOLS, "trigger": at(0), "clear_tool_inputs": inputs})
    assert [call.arguments_text for each in short.messages for call in each.tool_calls].count('{"a":1}') == left


def test_results_without_a_call_and_calls_that_wait_are_left_alone() -> None:
    chat = chat_of("a")
    chat.messages.add(role=TOOL, tool_call_id="lost").content.add(text="x" * 400)
    chat.messages.add(role=ASSISTANT).tool_calls.add(id="w", name="web_search")
    chat.messages.add(role=TOOL, tool_call_id="w")
    _, (applied,), short = done_without_results(chat)
    assert applied["cleared_tool_uses"] == 1
    assert [len(each.content) for each in short.messages if each.role == TOOL] == [1, 1, 0]


def done_without_results(chat: chat_pb2.ChatPayload) -> Any:
    keep = management({"type": TOOLS, "trigger": at(0), "keep": at(0, "tool_uses")})
    return None, *reversed(edited(chat, keep.edits or (), 1_000))


def test_thinking_of_old_turns_is_cleared_and_that_of_one_turn_stays_together() -> None:
    chat = chat_of("a", "b")
    chat.messages.add(role=USER).content.add(text="More")
    chat.messages.add(role=ASSISTANT, reasoning="again").content.add(text="Done")
    _, (applied,), short = done(chat, {"type": THINKING})
    assert [each.reasoning for each in short.messages if each.role == ASSISTANT] == ["", "", "again"]
    assert applied == {"type": THINKING, "cleared_thinking_turns": 1, "cleared_input_tokens": 4}
    for keep in ("all", {"type": "all"}, at(2, "thinking_turns")):
        assert done(chat, {"type": THINKING, "keep": keep})[1] == []


def test_edits_are_done_in_order_each_on_what_is_left() -> None:
    tokens = estimated_prompt_tokens(chat_of("a", "b", "c", "d", "e"))
    first = {"type": TOOLS, "trigger": at(0), "keep": at(1, "tool_uses")}
    _, applied, _ = done(chat_of("a", "b", "c", "d", "e"), first, {"type": TOOLS, "trigger": at(tokens - 100)})
    assert [each["cleared_tool_uses"] for each in applied] == [4]
    assert done(chat_of("a"), {"type": COMPACT}, {"type": "next_year_20270101", "x": 1})[1] == []


def test_cleared_tokens_are_scaled_to_those_of_the_engine() -> None:
    chat, edit = chat_of("a", "b", "c", "d"), {"type": TOOLS, "trigger": at(0)}
    (once,), (twice,) = (done(chat, edit, tokens=estimated_prompt_tokens(chat) * factor)[1] for factor in (1, 2))
    assert abs(twice["cleared_input_tokens"] - 2 * once["cleared_input_tokens"]) <= 1


def test_plan_of_a_compaction_has_the_documented_defaults() -> None:
    assert compaction_plan(None) is None
    assert compaction_plan(management({"type": TOOLS})) is None
    plan = compaction_plan(management({"type": COMPACT}))
    assert plan is not None
    assert (plan.threshold, plan.instructions, plan.pauses) == (150_000, "", False)
    given = {"trigger": at(60_000), "instructions": " Keep names. ", "pause_after_compaction": True}
    plan = compaction_plan(management({"type": COMPACT, **given}))
    assert plan is not None
    assert (plan.threshold, plan.instructions, plan.pauses) == (60_000, "Keep names.", True)


@pytest.mark.parametrize(
    "edit",
    [
        {"type": TOOLS, "trigger": 5},
        {"type": TOOLS, "keep": at(-1, "tool_uses")},
        {"type": TOOLS, "trigger": {"type": "characters", "value": 1}},
        {"type": THINKING, "keep": "none"},
        {"type": COMPACT, "trigger": {"type": "input_tokens"}},
        {},
    ],
)
def test_malformed_edits_are_refused(edit: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        management(edit)
