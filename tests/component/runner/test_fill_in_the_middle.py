"""Text on both sides of a gap: llama.cpp's route /infill as a text completion."""

import json
from typing import Any

import pytest
from aiohttp import web
from kit.failures import fails
from kit.http_server import http_server
from kit.upstream import upstream

from runner_svc.backend.port import CallInfo
from runner_svc.policy.parameters import EngineParameters
from runner_svc.runtimes.llama_server.runtime import PARAMETERS as LLAMA_SERVER
from runner_svc.runtimes.openai_http.runtime import PARAMETERS as ATTACHED
from weft.api.common.v1 import completion_pb2, event_pb2
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.structured_logs import new_traceparent

NO_TOKENS = "Infill is not supported by this model: prefix token is missing. suffix token is missing."


class Server:
    """A llama.cpp server with a model that has the tokens, or lacks them."""

    def __init__(self, end: dict[str, Any], *, has_tokens: bool = True) -> None:
        self.end, self.has_tokens = end, has_tokens
        self.asked: list[tuple[str, Any]] = []

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.asked.append((request.path, await request.json()))
        if not self.has_tokens:
            error = {"code": 501, "message": NO_TOKENS, "type": "not_supported_error"}
            return web.json_response({"error": error}, status=501)
        last = {"content": "", "stop": True, "tokens_evaluated": 9, "tokens_predicted": 2, **self.end}
        last["timings"] = {"cache_n": 4, "prompt_ms": 2.0, "predicted_ms": 3.0}
        parts = [{"content": "return ", "stop": False}, {"content": "a", "stop": False}, last]
        text = "".join(f"data: {json.dumps(part)}\n\n" for part in parts)
        return web.Response(text=text, content_type="text/event-stream")


def _gap(**fields: Any) -> completion_pb2.CompletionPayload:
    payload = completion_pb2.CompletionPayload(suffix="\nprint(f(1))", **fields)
    payload.prompts.add(text="def f(a):\n    ")
    payload.sampling.max_tokens = 4
    return payload


async def _events(
    server: Server, payload: completion_pb2.CompletionPayload, engine: EngineParameters = LLAMA_SERVER
) -> list[event_pb2.InferenceEvent]:
    async with http_server(server.answer) as url, upstream(url, engine, is_llama_server=True) as client:
        call = CallInfo(request_id="r", traceparent=new_traceparent())
        return [event async for frame in client.generate(payload, call) for event in frame]


@pytest.mark.parametrize(
    ("end", "finish", "stopped_by"),
    [
        ({"stop_type": "eos"}, event_pb2.FINISH_REASON_STOP, ""),
        ({"stop_type": "limit"}, event_pb2.FINISH_REASON_LENGTH, ""),
        ({"stop_type": "word", "stopping_word": "\n\n"}, event_pb2.FINISH_REASON_STOP, "\n\n"),
    ],
)
async def test_gap_is_filled_by_the_engines_own_route(end: dict[str, Any], finish: int, stopped_by: str) -> None:
    server = Server(end)
    events = await _events(server, _gap())
    ((path, body),) = server.asked
    assert path == "/infill"
    assert (body["input_prefix"], body["input_suffix"], body["max_tokens"]) == ("def f(a):\n    ", "\nprint(f(1))", 4)
    assert "".join(event.delta.text for event in events) == "return a"
    (last,) = [event.delta for event in events if event.delta.finish_reason]
    assert (last.finish_reason, last.stop_sequence) == (finish, stopped_by)
    (usage,) = [event.usage for event in events if event.HasField("usage")]
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_prompt_tokens) == (9, 2, 4)


async def test_model_without_the_tokens_is_refused_in_words_about_the_model() -> None:
    with fails(Reason.INVALID_ARGUMENT, "this model does not support fill-in-the-middle", field="suffix"):
        await _events(Server({}, has_tokens=False), _gap())


async def test_engine_without_the_route_is_not_asked() -> None:
    server = Server({})
    with fails(Reason.INVALID_ARGUMENT, "does not support fill-in-the-middle", field="suffix"):
        await _events(server, _gap(), ATTACHED)
    assert not server.asked


async def test_several_fillings_are_several_requests() -> None:
    server = Server({"stop_type": "eos"})
    events = await _events(server, _gap(choice_count=2))
    assert sorted(event.delta.index for event in events if event.delta.finish_reason) == [0, 1]
    assert len(server.asked) == 2


@pytest.mark.parametrize("field", ["prompt", "logprobs"])
async def test_what_the_route_cannot_do_is_refused_by_name(field: str) -> None:
    payload = _gap()
    if field == "prompt":
        payload.prompts[0].tokens.ids.extend([1, 2])
    else:
        payload.logprobs = 1
    with fails(Reason.INVALID_ARGUMENT, field=field):
        await _events(Server({}), payload)
