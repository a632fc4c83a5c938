import json

import pytest
from gateway_script import ScriptedDispatcher, Step, delta, finished, serving, usage
from messages_script import (
    CLAUDE_CODE_HEADERS,
    MESSAGES_PATH,
    CountingDispatcher,
    body,
    call,
    claude_code_request,
    events_of,
    names_of,
)

from weft.api.common.v1 import chat_pb2
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

COUNT_PATH = f"{MESSAGES_PATH}/count_tokens"


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
    assert len(payload.tools) == 12
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
