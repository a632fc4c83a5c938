"""Anthropic's API over HTTP, by its own client: what reaches the mesh, and what its clients rely on."""

import json
from collections.abc import Sequence
from typing import Any

import anthropic
import pytest
from gateway_script import FixedFleet, ScriptedDispatcher, Step, agent, delta, finished, hello, model, serving, usage
from messages_script import (
    CLAUDE_CODE_HEADERS,
    MESSAGES,
    MESSAGES_PATH,
    CountingDispatcher,
    anthropic_of,
    body,
    call,
    claude_code_request,
    events_of,
    names_of,
)

from weft.api.common.v1 import chat_pb2
from weft.dispatch.call import Call
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation

COUNT_PATH = f"{MESSAGES_PATH}/count_tokens"
VERSION = {"anthropic-version": "2023-06-01"}
FLEET = FixedFleet.of(*(model(name) for name in ("a", "b", "c", "d")), agents=[agent("reviewer", "a")])


class Turning(ScriptedDispatcher):
    """Answers each request with the next of its scripts."""

    def __init__(self, scripts: list[list[Step]]) -> None:
        super().__init__()
        self.scripts = scripts

    def script_of(self, call: Call[Any]) -> Sequence[Any]:
        return self.scripts.pop(0)


def asks_for_weather() -> list[Step]:
    return [[call(0, "call_1", "weather", '{"city":"Oslo"}')], [delta(finish="TOOL_CALLS"), finished()]]


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_has_text_stop_reason_and_usage(stream: bool) -> None:
    async with serving() as gateway, anthropic_of(gateway) as client:
        wanted: dict[str, Any] = {"model": "tiny", "max_tokens": 50, "messages": MESSAGES}
        if stream:
            async with client.messages.stream(**wanted) as events:
                answer = await events.get_final_message()
        else:
            answer = await client.messages.create(**wanted)
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


async def test_claude_code_request_is_fully_forwarded() -> None:
    steps: list[Step] = [
        [delta(reasoning="Next.")],
        [call(0, "toolu_3", "Read", '{"file_path"'), call(0, arguments=': "/b.py"}')],
        [delta(finish="TOOL_CALLS"), usage(), finished()],
    ]
    async with serving(ScriptedDispatcher(steps)) as gateway:
        raw = json.dumps(claude_code_request()).encode()
        response = await gateway.request("POST", f"{MESSAGES_PATH}?beta=true", raw, CLAUDE_CODE_HEADERS)
        payload = gateway.dispatcher.payloads[0]
    assert response.status == 200
    assert b": warning" not in response.body
    assert names_of(events_of(response)) == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert isinstance(payload, chat_pb2.ChatPayload)
    roles = [chat_pb2.Role.Name(turn.role).removeprefix("ROLE_") for turn in payload.messages]
    assert roles == ["SYSTEM", "USER", "ASSISTANT", "TOOL", "TOOL", "SYSTEM", "USER"]
    assert len(payload.messages[0].content) == 3
    assert [made.name for made in payload.messages[2].tool_calls] == ["Bash", "Read"]
    assert payload.messages[2].reasoning == "I should look."
    # The deferred `Write` was not found by a search so far.
    assert len(payload.tools) == 11
    assert payload.sampling.max_tokens == 32_000
    assert payload.reasoning_effort == chat_pb2.REASONING_EFFORT_HIGH
    assert not payload.HasField("thinking")


async def test_model_without_token_counting_returns_an_error() -> None:
    cannot = WeftError(Reason.UNSUPPORTED_OPERATION, "the model does not tokenize")
    async with serving(CountingDispatcher(counted=cannot)) as gateway:
        response = await gateway.request("POST", COUNT_PATH, body())
    error = response.error
    assert (response.status, error["code"], error["type"]) == (501, "unsupported_operation", "api_error")
    assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("path", [MESSAGES_PATH, COUNT_PATH])
async def test_server_side_conversation_is_rejected_as_clients_expect(path: str) -> None:
    async with serving(CountingDispatcher()) as gateway:
        response = await gateway.request("POST", path, body(thread={"type": "create"}))
    error = response.error
    assert (response.status, error["type"], error["param"]) == (400, "invalid_request_error", "thread")
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


async def test_client_lists_models_in_pages() -> None:
    async with serving(fleet=FLEET) as gateway, anthropic_of(gateway) as client:
        page = await client.beta.models.list(limit=2)
        found = [entry.id async for entry in page]
    assert ([entry.id for entry in page.data], page.has_more) == (["a", "b"], True)
    assert found == ["a", "b", "c", "d", "agent/reviewer"]


async def test_invalid_page_parameter_is_rejected_by_name() -> None:
    async with serving(fleet=FLEET) as gateway:
        for query, field in (
            ("limit=1001", "limit"),
            ("limit=00010", "limit"),
            ("after_id=gone", "after_id"),
            ("before_id=gone", "before_id"),
            ("after_id=a&before_id=b", "before_id"),
        ):
            response = await gateway.request("GET", f"/v1/models?{query}", headers=VERSION)
            assert response.status == 400
            assert response.error["param"] == field
