"""A central model of a provider with Anthropic's API, through Anthropic's SDK and OpenAI's API."""

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import anthropic
import pytest
from chats import answers
from kit.messages_provider import (
    MessagesProvider,
    MessagesReply,
    messages_provider,
    redacted_block,
    signature_of,
    text_block,
    thinking_block,
    tool_block,
)
from mesh_process import MeshProcess, eventually, run_weft

KEY, MODEL, SECRET = "sk-canary-0123456789", "large", "messages-key"
PERMIT = {"allow_remote": True}
TOOL: Any = {
    "name": "look",
    "description": "Looks.",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}},
    "cache_control": {"type": "ephemeral"},
}


@pytest.fixture
async def mesh(common_mesh: MeshProcess) -> AsyncIterator[MeshProcess]:
    yield common_mesh
    for declared in (f"model/{MODEL}", f"secret/{SECRET}"):
        await common_mesh.weft("delete", declared)


@pytest.fixture
async def provider(mesh: MeshProcess) -> AsyncIterator[MessagesProvider]:
    async with messages_provider() as provider:
        provider.keys.add(KEY)
        await run_weft("keys", "secret", "create", SECRET, "-", home=mesh.home, stdin=KEY.encode())
        options = ("--api", "anthropic", "--api-key-ref", f"secret/{SECRET}", "--upstream-model", "large-4")
        await mesh.weft("models", "create", MODEL, "--url", provider.url, *options)
        await eventually(partial(answers, mesh.url, MODEL, **PERMIT), 30.0, "the model was not served")
        provider.bodies.clear()
        yield provider


async def test_tools_thinking_and_cache_marks_round_trip_in_a_stream(
    mesh: MeshProcess, provider: MessagesProvider
) -> None:
    call = tool_block("toolu_1", "look", '{"at":', '"it"}')
    thoughts = (thinking_block("Hm. ", "Yes."), redacted_block("xyz"))
    provider.replies.append(MessagesReply(blocks=(*thoughts, call), stop_reason="tool_use"))
    provider.replies.append(MessagesReply(blocks=(thinking_block("So."), text_block("It is there."))))
    thinks: Any = {"type": "enabled", "budget_tokens": 2_000}
    question: Any = [{"role": "user", "content": "Look."}]
    async with anthropic.AsyncAnthropic(base_url=mesh.url, api_key="unused", max_retries=0) as sdk:
        async with sdk.messages.stream(
            model=MODEL,
            max_tokens=4_000,
            messages=question,
            tools=[TOOL],
            thinking=thinks,
            extra_body=PERMIT,
        ) as stream:
            first = await stream.get_final_message()
        assert [block.type for block in first.content] == ["thinking", "redacted_thinking", "tool_use"]
        assert first.content[0].thinking == "Hm. Yes."  # type: ignore[union-attr]  # its type was compared
        assert first.content[0].signature == signature_of("Hm. Yes.")  # type: ignore[union-attr]
        assert first.content[2].input == {"at": "it"}  # type: ignore[union-attr]
        assert first.stop_reason == "tool_use"

        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "seen"}
        mark = {"cache_control": {"type": "ephemeral"}}
        turns: Any = [
            *question,
            {"role": "assistant", "content": [block.model_dump() for block in first.content]},
            {"role": "user", "content": [result | mark]},
        ]
        second = await sdk.messages.create(
            model=MODEL, max_tokens=4_000, messages=turns, tools=[TOOL], thinking=thinks, extra_body=PERMIT
        )
    assert second.stop_reason == "end_turn"
    assert [block.type for block in second.content] == ["thinking", "text"]
    assert second.content[0].signature == signature_of("So.")  # type: ignore[union-attr]
    asked, told = provider.bodies
    assert asked["thinking"] == told["thinking"] == thinks
    assert told["messages"][1]["content"][:2] == [
        {"type": "thinking", "thinking": "Hm. Yes.", "signature": signature_of("Hm. Yes.")},
        {"type": "redacted_thinking", "data": "xyz"},
    ]
    assert asked["tools"] == [TOOL]
    sent = told["messages"][2]["content"][0]
    assert (sent["type"], sent["tool_use_id"], sent["cache_control"]) == (
        "tool_result",
        "toolu_1",
        mark["cache_control"],
    )
