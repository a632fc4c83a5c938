"""What an engine refuses of a chat: schemas and names of functions, and the option for usage in streams."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer
from kit.engines import chat
from kit.failures import fails
from kit.upstream import upstream
from typing_extensions import override

from runner_svc.backend.port import CallInfo
from runner_svc.openai_upstream.client import OpenAiHttp
from runner_svc.policy.parameters import EngineParameters
from runner_svc.runtimes.llama_server.runtime import PARAMETERS as LLAMA_SERVER
from runner_svc.runtimes.openai_remote.runtime import PARAMETERS as PROVIDER
from weft.api.common.v1 import chat_pb2
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.structured_logs import new_traceparent
from weft.kernel.text.json_objects import to_json_object

FAULT = "Unable to generate parser for this template. JSON schema error at #/properties/a: unsupported $ref #"


class Stage:
    """An engine that calls the last function of a request, or refuses it."""

    def __init__(self, refused_words: str = "") -> None:
        self.refused_words = refused_words
        self.fault = FAULT
        self.bodies: list[Any] = []

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.refused_words and self.refused_words in json.dumps(body):
            return web.json_response({"error": {"message": self.fault, "type": "invalid_request_error"}}, status=400)
        name = body["tools"][-1]["function"]["name"] if body.get("tools") else "none"
        function = {"name": name, "arguments": "{}"}
        delta = {
            "role": "assistant",
            "tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": function}],
        }
        chunks: list[Any] = [
            {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
            {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
            {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}},
        ]
        text = "".join(f"data: {json.dumps(dict(chunk, model='m'))}\n\n" for chunk in chunks)
        return web.Response(text=f"{text}data: [DONE]\n\n", content_type="text/event-stream")


@asynccontextmanager
async def _client(stage: Stage, engine: EngineParameters) -> AsyncIterator[OpenAiHttp]:
    async with (
        RawTestServer(stage.answer) as server,
        upstream(str(server.make_url("")).rstrip("/"), engine) as client,
    ):
        yield client


def _chat(*names: str, schema: dict[str, Any] | None = None, **fields: Any) -> chat_pb2.ChatPayload:
    payload = chat(**fields)
    for name in names:
        parameters = to_json_object(schema or {"type": "object"}, "schema")
        payload.tools.add(function=chat_pb2.FunctionTool(name=name, parameters=parameters))
    return payload


async def _events(client: OpenAiHttp, payload: chat_pb2.ChatPayload) -> list[Any]:
    call = CallInfo(request_id="r", traceparent=new_traceparent())
    return [event async for frame in client.generate(payload, call) for event in frame]


def _called(events: list[Any]) -> list[str]:
    return [call.name for event in events for call in event.delta.tool_calls]


def _warned(events: list[Any]) -> list[str]:
    return [event.warning.field for event in events if event.HasField("warning")]


async def test_unsupported_schema_is_simplified_with_a_warning() -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#"}, "b": {"type": "string"}}, "required": ["b"]}
    stage = Stage(refused_words="$ref")
    async with _client(stage, LLAMA_SERVER) as client:
        events = await _events(client, _chat("look", schema=schema))
    assert _called(events) == ["look"]
    assert _warned(events) == ["tools[0].function.parameters"]
    sent = stage.bodies[1]["tools"][0]["function"]["parameters"]
    assert sent == {"type": "object", "properties": {"a": {}, "b": {"type": "string"}}, "required": ["b"]}


async def test_request_rejected_for_another_reason_is_not_retried() -> None:
    stage = Stage(refused_words="messages")
    async with _client(stage, LLAMA_SERVER) as client:
        with fails(Reason.BACKEND_REJECTED):
            await _events(client, _chat("look"))
    assert len(stage.bodies) == 1


async def test_dotted_names_are_mapped_for_a_provider_that_rejects_dots() -> None:
    payload = _chat("files_read", "files.read")
    payload.tool_choice.function_name = "files.read"
    turn = payload.messages.add(role=chat_pb2.ROLE_ASSISTANT)
    turn.tool_calls.add(id="c0", name="files.read", arguments_text="{}")
    stage = Stage()
    async with _client(stage, PROVIDER) as client:
        events = await _events(client, payload)
    (body,) = stage.bodies
    assert [tool["function"]["name"] for tool in body["tools"]] == ["files_read", "files_read_2"]
    assert body["tool_choice"]["function"]["name"] == "files_read_2"
    assert body["messages"][1]["tool_calls"][0]["function"]["name"] == "files_read_2"
    assert _called(events) == ["files.read"]
    assert payload.tools[1].function.name == "files.read"


@pytest.mark.parametrize(
    ("engine", "name", "sent"),
    [
        (LLAMA_SERVER, "files/read", "files_read"),
        (LLAMA_SERVER, "files.read", "files.read"),
        (PROVIDER, "mcp__" + "x" * 100, "mcp__" + "x" * 59),
    ],
)
async def test_name_is_mapped_for_an_engine_that_rejects_it(engine: EngineParameters, name: str, sent: str) -> None:
    stage = Stage()
    async with _client(stage, engine) as client:
        assert _called(await _events(client, _chat(name))) == [name]
    assert stage.bodies[0]["tools"][0]["function"]["name"] == sent


class OldServer(Stage):
    """Refuses the option for usage in streams, and sends none."""

    @override
    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.json()
        if "stream_options" in body:
            self.bodies.append(body)
            said = [{"loc": ["body", "stream_options"], "msg": "extra fields not permitted"}]
            return web.json_response({"detail": said}, status=422)
        return await super().answer(request)


async def test_option_that_a_server_refuses_is_left_out_of_this_request_and_of_later_ones() -> None:
    stage = OldServer()
    async with _client(stage, LLAMA_SERVER) as client:
        for _ in range(2):
            assert _called(await _events(client, _chat("look"))) == ["look"]
    assert ["stream_options" in body for body in stage.bodies] == [True, False, False]


async def test_server_that_refuses_even_what_is_not_sent_is_asked_twice() -> None:
    stage = Stage(refused_words="messages")
    stage.fault = "stream_options is not supported"
    async with _client(stage, LLAMA_SERVER) as client:
        with fails(Reason.BACKEND_REJECTED):
            await _events(client, _chat("look"))
    assert len(stage.bodies) == 2
