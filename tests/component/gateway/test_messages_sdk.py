import json
from collections.abc import Sequence
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import Message, ToolUseBlock
from gateway_script import (
    ScriptedDispatcher,
    Step,
    delta,
    finished,
    hello,
    serving,
    started,
)
from messages_script import MESSAGES, WEATHER, anthropic_of, call, two_calls

from weft.api.common.v1 import chat_pb2
from weft.dispatch.call import Call
from weft.kernel.request import Operation


class Turning(ScriptedDispatcher):
    """Answers each request with the next of its scripts."""

    def __init__(self, scripts: list[list[Step]]) -> None:
        super().__init__()
        self.scripts = scripts

    def script_of(self, call: Call[Any]) -> Sequence[Any]:
        return self.scripts.pop(0)


def asks_for_weather() -> list[Step]:
    return [[call(0, "call_1", "weather", '{"city":"Oslo"}')], [delta(finish="TOOL_CALLS"), finished()]]


async def ask(client: AsyncAnthropic, *, stream: bool, **fields: Any) -> Message:
    wanted: dict[str, Any] = {"model": "tiny", "max_tokens": 50, "messages": MESSAGES} | fields
    if not stream:
        answer = await client.messages.create(**wanted)
        assert isinstance(answer, Message)
        return answer
    async with client.messages.stream(**wanted) as events:
        return await events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_has_text_stop_reason_and_usage(stream: bool) -> None:
    async with serving() as gateway, anthropic_of(gateway) as client:
        answer = await ask(client, stream=stream)
        context, payload = gateway.dispatcher.contexts[0], gateway.dispatcher.payloads[0]
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "Hello, world"}]
    assert (answer.stop_reason, answer.stop_sequence, answer.role, answer.model) == (
        "end_turn",
        None,
        "assistant",
        "tiny",
    )
    assert answer.id.startswith("msg-")
    counts = answer.usage
    assert (counts.input_tokens, counts.cache_read_input_tokens, counts.cache_creation_input_tokens) == (2, 5, 0)
    assert counts.output_tokens == 3
    assert (context.model, context.operation) == ("tiny", Operation.CHAT)
    assert isinstance(payload, chat_pb2.ChatPayload)
    assert payload.sampling.max_tokens == 50


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_text_and_tool_calls_are_ordered_blocks(stream: bool) -> None:
    async with serving(ScriptedDispatcher(two_calls())) as gateway, anthropic_of(gateway) as client:
        answer = await ask(client, stream=stream, tools=[WEATHER])
    assert [block.to_dict() for block in answer.content] == [
        {"type": "thinking", "thinking": "The user asks.", "signature": ""},
        {"type": "text", "text": "Looking it up."},
        {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Oslo"}},
        {"type": "tool_use", "id": "call_2", "name": "weather", "input": {}},
    ]
    assert answer.stop_reason == "tool_use"
    assert answer.usage.output_tokens_details is not None
    assert answer.usage.output_tokens_details.thinking_tokens == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_keeps_provider_signatures_and_redacted_blocks(stream: bool) -> None:
    steps: list[Step] = [
        [delta(reasoning="Let me ")],
        [delta(reasoning="see.")],
        [delta(reasoning_signature="s1")],
        [delta(redacted_reasoning="xyz")],
        [delta(reasoning_signature="s2")],
        [delta(reasoning="More.")],
        [delta(text="Yes.", reasoning_signature="s3")],
        [delta(finish="STOP"), finished()],
    ]
    async with serving(ScriptedDispatcher(steps)) as gateway, anthropic_of(gateway) as client:
        answer = await ask(client, stream=stream)
    assert [block.to_dict() for block in answer.content] == [
        {"type": "thinking", "thinking": "Let me see.", "signature": "s1"},
        {"type": "redacted_thinking", "data": "xyz"},
        {"type": "thinking", "thinking": "", "signature": "s2"},
        {"type": "thinking", "thinking": "More.", "signature": "s3"},
        {"type": "text", "text": "Yes."},
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("finish", "reason"), [("STOP", "end_turn"), ("LENGTH", "max_tokens"), ("CONTENT_FILTER", "refusal")]
)
async def test_stop_reason_reports_why_the_answer_ended(stream: bool, finish: str, reason: str) -> None:
    steps: list[Step] = [[delta("Hi")], [delta(finish=finish), finished()]]
    async with serving(ScriptedDispatcher(steps)) as gateway, anthropic_of(gateway) as client:
        assert (await ask(client, stream=stream)).stop_reason == reason


@pytest.mark.parametrize("stream", [False, True])
async def test_text_refusal_is_text_with_the_refusal_stop_reason(stream: bool) -> None:
    steps: list[Step] = [[delta(refusal="I will not.", finish="STOP"), finished()]]
    async with serving(ScriptedDispatcher(steps)) as gateway, anthropic_of(gateway) as client:
        answer = await ask(client, stream=stream)
    assert (answer.stop_reason, [block.to_dict() for block in answer.content]) == (
        "refusal",
        [{"type": "text", "text": "I will not."}],
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("arguments", ['{"city": }', '["Oslo"]', '"Oslo"', '{"city": "Oslo"', "{} {}", "NaN", "Oslo"])
async def test_non_object_arguments_are_an_error_and_never_an_input(stream: bool, arguments: str) -> None:
    steps: list[Step] = [[call(0, "call_1", "weather", arguments)], [delta(finish="TOOL_CALLS"), finished()]]
    async with serving(ScriptedDispatcher(steps)) as gateway, anthropic_of(gateway) as client:
        with pytest.raises(anthropic.APIStatusError) as caught:
            await ask(client, stream=stream, tools=[WEATHER])
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["error"]["code"] == "tool_call_invalid"


async def test_call_truncated_by_the_token_limit_is_dropped_with_a_warning() -> None:
    steps: list[Step] = [
        [delta("Let me see.")],
        [call(0, "call_1", "weather", '{"city": "Os')],
        [delta(finish="LENGTH"), finished()],
    ]
    async with serving(ScriptedDispatcher(steps)) as gateway, anthropic_of(gateway) as client:
        answer = await ask(client, stream=False, tools=[WEATHER])
    assert (answer.stop_reason, [block.type for block in answer.content]) == ("max_tokens", ["text"])
    assert answer.to_dict()["warnings"] == [
        {
            "code": "tool_call_cut",
            "field": None,
            "message": "the answer ended within a call of weather, which was left out",
        }
    ]


async def test_streamed_call_truncated_by_the_token_limit_ends_with_max_tokens() -> None:
    steps: list[Step] = [[call(0, "call_1", "weather", '{"city": "Os')], [delta(finish="LENGTH"), finished()]]
    async with serving(ScriptedDispatcher(steps)) as gateway, anthropic_of(gateway) as client:
        answer = await ask(client, stream=True, tools=[WEATHER])
    assert (answer.stop_reason, [block.type for block in answer.content]) == ("max_tokens", ["tool_use"])


async def test_parsed_output_follows_the_schema() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    steps: list[Step] = [[started()], [delta('{"city":"Oslo"}', finish="STOP"), finished()]]
    async with serving(ScriptedDispatcher(steps)) as gateway, anthropic_of(gateway) as client:
        answer = await ask(
            client, stream=False, output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
        )
        payload = gateway.dispatcher.payloads[0]
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": '{"city":"Oslo"}'}]
    assert isinstance(payload, chat_pb2.ChatPayload)
    assert [member.name for member in payload.response_format.json_schema.schema.fields] == ["type", "properties"]
    assert payload.reasoning_effort == chat_pb2.REASONING_EFFORT_LOW


async def test_sdk_tool_runner_completes_without_server_side_threads() -> None:
    @anthropic.beta_async_tool
    async def weather(city: str) -> str:
        """Tell the weather."""
        return f"Rain in {city}"

    async with serving(Turning([asks_for_weather(), hello()])) as gateway, anthropic_of(gateway) as client:
        runner = client.beta.messages.tool_runner(
            model="tiny", max_tokens=9, messages=[{"role": "user", "content": "Say hello"}], tools=[weather]
        )
        answer = await runner.until_done()
        asked = gateway.dispatcher.payloads
    assert [block.to_dict()["text"] for block in answer.content] == ["Hello, world"]
    assert len(asked) == 2
    assert isinstance(asked[1], chat_pb2.ChatPayload)
    assert [chat_pb2.Role.Name(turn.role) for turn in asked[1].messages] == [
        "ROLE_USER",
        "ROLE_ASSISTANT",
        "ROLE_TOOL",
    ]
    assert asked[1].messages[2].content[0].text == "Rain in Oslo"
    assert [tool.function.name for tool in asked[1].tools] == ["weather"]


@pytest.mark.parametrize("stream", [False, True])
async def test_unusual_tool_input_is_preserved_exactly(stream: bool) -> None:
    arguments = ' {"n": 123456789012345678901234567890, "x": 1e5, "\\u00e9": ["\u2028", null], "n2": -0.0}\n'
    steps: list[Step] = [[call(0, "", "weather", arguments)], [delta(finish="STOP"), finished()]]
    async with serving(ScriptedDispatcher(steps)) as gateway, anthropic_of(gateway) as client:
        answer = await ask(client, stream=stream, tools=[WEATHER])
    (block,) = answer.content
    assert isinstance(block, ToolUseBlock)
    assert block.input == json.loads(arguments)
    assert block.id.startswith("toolu-")
    assert answer.stop_reason == "tool_use"
