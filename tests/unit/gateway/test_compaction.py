"""Decisions about long conversations: when they are compacted, in which parts, and what takes their place."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.answers.compaction import CompactionPlan, compacted, in_parts, summary_request, summary_text, whole_text
from weft.api.common.v1 import chat_pb2
from weft.dispatch.payload_description import estimated_prompt_tokens
from weft.kernel.errors.error_tree import WeftError

SYSTEM, USER, ASSISTANT, TOOL = chat_pb2.ROLE_SYSTEM, chat_pb2.ROLE_USER, chat_pb2.ROLE_ASSISTANT, chat_pb2.ROLE_TOOL
PNG = chat_pb2.ContentPart(image=chat_pb2.MediaPart(data=b"png", media_type="image/png"))


def chat_of(*turns: tuple[chat_pb2.Role.ValueType, str], tool: str = "ls") -> chat_pb2.ChatPayload:
    chat = chat_pb2.ChatPayload(tools=[chat_pb2.Tool(function=chat_pb2.FunctionTool(name=tool))])
    for role, text in turns:
        chat.messages.add(role=role, content=[chat_pb2.ContentPart(text=text)])
    return chat


def words_of(chats: Sequence[chat_pb2.ChatPayload]) -> str:
    return "".join(part.text for chat in chats for message in chat.messages for part in message.content)


def test_request_for_a_summary_keeps_the_prompt_and_drops_what_concerns_the_answer() -> None:
    chat = chat_of((SYSTEM, "Be terse."), (USER, "Hi"))
    chat.sampling.max_tokens, chat.sampling.temperature, chat.choice_count, chat.logprobs = 5, 0.25, 2, True
    chat.sampling.stop.append("x")
    chat.tool_choice.function_name = "ls"
    chat.response_format.json_object = True
    asked = summary_request(chat, "Keep the names.", "it began")
    assert (list(asked.messages)[:-1], asked.tools) == (list(chat.messages), chat.tools)
    sampling = asked.sampling
    assert (sampling.temperature, sampling.HasField("max_tokens"), list(sampling.stop)) == (0.25, False, [])
    assert asked.tool_choice.mode == chat_pb2.ToolChoice.MODE_NONE
    assert not any(asked.HasField(name) for name in ("choice_count", "response_format"))
    assert not asked.logprobs
    last = asked.messages[-1].content[0].text
    assert ("Keep the names." in last, last.endswith("it began")) == (True, True)
    assert not summary_request(chat_pb2.ChatPayload()).HasField("tool_choice")


@pytest.mark.parametrize(
    ("threshold", "tokens", "is_due"), [(None, 10**9, False), (1000, 1000, False), (1000, 1001, True), (1, 5000, True)]
)
def test_conversation_is_due_above_its_threshold(threshold: int | None, tokens: int, is_due: bool) -> None:
    chat = chat_of((USER, "x" * 4000))
    assert CompactionPlan(threshold=threshold).is_due(chat, tokens) is is_due


def test_long_system_prompt_and_tools_are_not_due() -> None:
    chat = chat_of((SYSTEM, "x" * 8000), (USER, "Hi"), tool="t" * 8000)
    assert not CompactionPlan(threshold=1000).is_due(chat, estimated_prompt_tokens(chat))


@pytest.mark.parametrize("pieces", [[], [""], [" \n", "\t"]])
def test_summary_without_words_is_none(pieces: list[str]) -> None:
    with pytest.raises(WeftError, match="wrote no summary"):
        summary_text(pieces, is_cut=False)


def test_whole_summary_ends_with_the_last_words_of_the_user() -> None:
    chat = chat_of((USER, "first"), (ASSISTANT, "ok"), (USER, "second"), (ASSISTANT, "well"))
    assert whole_text("so far", chat, 100).endswith("\n\nsecond")
    assert "first" not in whole_text("so far", chat, 100)
    chat.messages.add(role=TOOL, content=[chat_pb2.ContentPart(text="a.py")])
    assert whole_text("so far", chat, 100).endswith("Continue it.]")
    assert whole_text("so far", chat_of(), 100) == "so far"


def test_long_last_words_and_files_are_marked_as_shortened() -> None:
    chat = chat_of((USER, "a" * 300 + "b" * 300))
    chat.messages[-1].content.append(PNG)
    text = whole_text("so far", chat, 100)
    assert ("shortened" in text, text.count("a" * 50), len(text) < 300) == (True, 1, True)
    assert "file left out" in whole_text("so far", chat, 10_000)


def test_compacted_chat_keeps_system_messages_and_tools() -> None:
    chat = chat_of((SYSTEM, "Be terse."), (USER, "Hi"), (ASSISTANT, "Hi"), (SYSTEM, "b.py was opened."))
    short = compacted(chat, "so far")
    assert [(each.role, each.content[0].text) for each in short.messages] == [
        (SYSTEM, "Be terse."),
        (SYSTEM, "b.py was opened."),
        (USER, "so far"),
    ]
    assert (short.tools, len(chat.messages)) == (chat.tools, 4)


@given(
    texts=st.lists(st.tuples(st.sampled_from([USER, ASSISTANT, TOOL]), st.text("ab ", max_size=3000)), max_size=12),
    most=st.integers(0, 2000),
)
def test_parts_have_all_words_in_order_and_fit(texts: list[tuple[chat_pb2.Role.ValueType, str]], most: int) -> None:
    chat = chat_of((SYSTEM, "S."), *texts)
    parts = in_parts(chat, most, 1000)
    for part in parts:
        assert estimated_prompt_tokens(summary_request(part)) <= most
        assert part.messages[0].content[0].text == "S."
        assert part.messages[1].role != TOOL
    if parts:
        assert words_of(parts).replace("S.", "") == "".join(text for _, text in texts)


def test_too_many_parts_are_shortened_or_refused() -> None:
    long = chat_of(*[(USER, "x" * 30_000), (ASSISTANT, "y" * 200)])
    parts = in_parts(long, 1_000, 8)
    assert 0 < len(parts) <= 8
    assert "shortened" in words_of(parts)
    assert in_parts(chat_of(*[(USER, "x" * 1_000)] * 100), 1_000, 8) == ()
    assert in_parts(chat_of((USER, "x"), tool="t" * 9_000), 1_000, 8) == ()


def test_call_with_long_arguments_and_a_file_becomes_text() -> None:
    chat = chat_of((USER, "Write it"))
    chat.messages.add(role=ASSISTANT, content=[PNG]).tool_calls.add(id="c", name="write", arguments_text="z" * 4_000)
    parts = in_parts(chat, 800, 100)
    assert words_of(parts).count("z") == 4_000
    assert "[write was called with zz" in words_of(parts)
