"""Where the prompts of a session change near their beginning."""

import pytest

from weft.api.common.v1 import chat_pb2, receipt_pb2
from weft.dispatch.prompt_beginnings import MAX_SESSIONS, PromptBeginnings

RULES = "You are a coding agent. Follow these rules, and ask before you delete anything. " * 20


def _chat(system: str, *turns: str, tools: tuple[str, ...] = ()) -> chat_pb2.ChatPayload:
    chat = chat_pb2.ChatPayload()
    if system:
        chat.messages.add(role=chat_pb2.ROLE_SYSTEM).content.add(text=system)
    for turn in turns:
        chat.messages.add(role=chat_pb2.ROLE_USER).content.add(text=turn)
    for name in tools:
        chat.tools.add(function=chat_pb2.FunctionTool(name=name, description=f"calls {name}"))
    return chat


def _noted(*chats: chat_pb2.ChatPayload, key: bytes = b"k") -> list[receipt_pb2.PromptChange | None]:
    beginnings = PromptBeginnings()
    return [beginnings.note(key, "s-1", chat) for chat in chats]


def test_prompt_change_at_character_79_is_reported_with_its_position_and_count() -> None:
    _, first, second = _noted(*(_chat(f"{RULES[:78]}{minute} {RULES}", "hi") for minute in "123"))
    assert first is not None
    assert (first.session, first.change_count, first.request_count) == ("s-1", 1, 2)
    assert first.same_character_count < 79 <= first.end_character
    assert second is not None
    assert (second.change_count, second.request_count) == (2, 3)


def test_late_prompt_change_is_located_within_64_characters() -> None:
    _, change = _noted(_chat(RULES + "monday"), _chat(RULES + "friday"))
    assert change is not None
    assert change.same_character_count < len(RULES) + 1 <= change.end_character <= change.same_character_count + 64


@pytest.mark.parametrize(
    "chats",
    [
        (_chat(RULES, "one"), _chat(RULES, "one", "two"), _chat(RULES, "other")),
        (_chat("", "one"), _chat("", "two")),
        (_chat(RULES), _chat("Write a title.", "one"), _chat(RULES), _chat("Write a title.", "two")),
        # Claude Code's header changes with each request, and reaches no engine.
        tuple(_chat(f"x-anthropic-billing-header: cc_version=2.1.37; cch={n};\n\n{RULES}") for n in ("a1b2c", "d3e4f")),
    ],
)
def test_conversation_turn_new_task_and_ignored_header_are_not_prompt_changes(
    chats: tuple[chat_pb2.ChatPayload, ...],
) -> None:
    assert not any(_noted(*chats))


def test_reordered_tools_are_a_prompt_change() -> None:
    _, change, again = _noted(*(_chat(RULES, tools=tools) for tools in (("a", "b"), ("b", "a"), ("a", "b"))))
    assert change is not None
    assert change.in_tools
    assert again is None, "an agent that changes between two prompts finds both in the cache"


def test_equal_sessions_of_two_tenants_are_not_compared() -> None:
    beginnings = PromptBeginnings()
    assert beginnings.note(b"tenant-a", "s", _chat(RULES + "a")) is None
    assert beginnings.note(b"tenant-b", "s", _chat(RULES + "b")) is None


def test_sessions_are_bounded_and_no_text_is_stored() -> None:
    beginnings = PromptBeginnings()
    for number in range(MAX_SESSIONS + 10):
        beginnings.note(b"%d" % number, "s", _chat("a secret that nobody may read here"))
    assert len(beginnings) == MAX_SESSIONS
    assert "secret" not in repr(vars(beginnings))
