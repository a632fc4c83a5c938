"""Recognition of coding agents by what they send; the forms are those of the programs in November 2026."""

from typing import Any

import pytest

from gateway.anthropic.schema import MessagesRequest
from gateway.intake.agent_labels import HEADERS, MAX_SYSTEM_CHARS, PREFIXES, agent_labels
from gateway.openai.chat_schema import ChatRequest
from gateway.responses.schema import ResponsesRequest
from weft.kernel.requests.placement_request import AGENT_VALUES

CLAUDE = {b"user-agent": b"claude-cli/2.1.332 (external, cli)"}
CODEX = {b"user-agent": b"codex_exec/0.171.0 (Linux; x86_64)", b"thread-id": b"t-1"}
OPENCODE = {b"user-agent": b"opencode/1.18.33"}
HELLO = [("user", "hello")]


def labels(headers: dict[bytes, bytes], system: str = "", last: object = "hello") -> tuple[str, str, str]:
    found = agent_labels(headers, [("system", system), ("user", "before"), ("assistant", "yes"), ("user", last)])
    assert all(value in AGENT_VALUES[name] for name, value in found.items())
    return found.get("program", ""), found.get("agent", ""), found.get("purpose", "")


def test_requests_of_other_programs_have_no_labels() -> None:
    assert agent_labels({b"user-agent": b"OpenAI/Python 3.57.0"}, [("system", "You are a title generator")]) == {}
    assert agent_labels({}, []) == {}


@pytest.mark.parametrize(
    ("headers", "system", "expected"),
    [
        (CLAUDE, "You are Claude Code", ("claude-code", "main", "turn")),
        (CLAUDE | {b"x-claude-code-agent-id": b"a-1"}, "", ("claude-code", "sub", "turn")),
        (CLAUDE, "x-anthropic-billing-header: cc_is_subagent=true;", ("claude-code", "sub", "turn")),
        (CODEX, "", ("codex", "main", "turn")),
        (CODEX | {b"x-openai-subagent": b"collab_spawn"}, "", ("codex", "sub", "turn")),
        (CODEX | {b"x-codex-parent-thread-id": b"t-0"}, "", ("codex", "sub", "turn")),
        (OPENCODE | {b"x-parent-session-id": b"s-0"}, "", ("opencode", "sub", "turn")),
        ({b"user-agent": b"QwenCode/0.24.4"}, "You are a general-purpose subagent", ("qwen-code", "sub", "turn")),
        ({b"x-interaction-type": b"conversation-subagent"}, "", ("copilot", "sub", "turn")),
        ({b"x-initiator": b"agent"}, "", ("copilot", "main", "turn")),
        ({b"user-agent": b"ai-sdk/openai"}, "You are Cline, a", ("cline", "main", "turn")),
    ],
)
def test_programs_and_their_sub_agents_are_recognized(
    headers: dict[bytes, bytes], system: str, expected: tuple[str, str, str]
) -> None:
    assert labels(headers, system) == expected


@pytest.mark.parametrize(
    ("headers", "system", "last", "purpose"),
    [
        (CLAUDE, "Hello.\nYou are naming a coding session", "hello", "title"),
        (CLAUDE, "You run a web search for another Claude model, so", "hello", "search"),
        (CLAUDE, "", "CRITICAL: Respond with TEXT ONLY. Do not call", "compaction"),
        (CODEX, "", "You are performing a CONTEXT CHECKPOINT COMPACTION. Create", "compaction"),
        (CODEX | {b"x-codex-turn-metadata": b'{"turn_id": "1", "request_kind": "compaction"}'}, "", "", "compaction"),
        (CODEX | {b"x-codex-turn-metadata": b'{"request_kind":"turn"}'}, "", "", "turn"),
        (OPENCODE, "You are a title generator. You output", "hello", "title"),
        (OPENCODE, "You are a context summarization agent", "hello", "compaction"),
    ],
)
def test_side_calls_are_told_from_turns(headers: dict[bytes, bytes], system: str, last: str, purpose: str) -> None:
    assert labels(headers, system, last)[2] == purpose


def test_text_far_behind_the_beginning_of_the_system_message_is_not_searched() -> None:
    assert labels(CLAUDE, " " * MAX_SYSTEM_CHARS + "You are a title generator")[2] == "turn"


def test_a_conversation_about_such_a_text_is_a_turn() -> None:
    assert labels(CLAUDE, "", "What does 'CRITICAL: Respond with TEXT ONLY' mean?")[2] == "turn"


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        (ChatRequest, {"messages": [{"role": "developer", "content": [{"type": "text", "text": "SYSTEM"}]}]}),
        (MessagesRequest, {"system": [{"type": "text", "text": "SYSTEM"}], "messages": [], "max_tokens": 1}),
        (MessagesRequest, {"messages": [{"role": "system", "content": "SYSTEM"}], "max_tokens": 1}),
        (ResponsesRequest, {"instructions": "SYSTEM", "input": "hi"}),
        (ResponsesRequest, {"input": [{"role": "developer", "content": [{"type": "input_text", "text": "SYSTEM"}]}]}),
        (ResponsesRequest, {"instructions": "SYSTEM", "messages": []}),
    ],
)
def test_every_chat_api_says_its_turns(schema: Any, body: dict[str, Any]) -> None:
    name = "input" if isinstance(body.get("input"), list) else "messages"
    if isinstance(body.get("input"), str):
        body = {**body, "input": "CRITICAL: Respond with TEXT ONLY"}
    else:
        body = {**body, name: [*body[name], {"role": "user", "content": "CRITICAL: Respond with TEXT ONLY"}]}
    turns = schema.model_validate({"model": "m", **body}).turns
    assert agent_labels(CLAUDE, turns)["purpose"] == "compaction"
    marked = [(role, "You are a title generator" if role in ("system", "developer") else text) for role, text in turns]
    assert agent_labels(CLAUDE, marked)["purpose"] == "title"


def test_the_cheap_check_before_finds_every_program() -> None:
    for headers in (CLAUDE, CODEX, OPENCODE, {b"user-agent": b"QwenCode/1"}, {b"user-agent": b"ai-sdk/x"}):
        assert headers[b"user-agent"].startswith(PREFIXES)
    assert {b"x-initiator", b"x-interaction-type", b"x-parent-session-id", b"x-codex-turn-metadata"} <= HEADERS
