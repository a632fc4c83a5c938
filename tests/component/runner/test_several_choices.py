"""Several choices from engines that give fewer at once, or refuse them."""

import json
from typing import Any

import pytest
from aiohttp import web
from kit.failures import fails
from kit.http_server import http_server
from kit.upstream import upstream

from runner_svc.backend.port import CallInfo
from runner_svc.policy.parameters import EngineParameters
from runner_svc.runtimes.openai_http.runtime import PARAMETERS as ATTACHED
from weft.api.common.v1 import chat_pb2, completion_pb2
from weft.dispatch.frames import GenerationPayload
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.structured_logs import new_traceparent

TOO_MANY = "n_cmpl cannot be greater than the number of slots, please increase -np"


class Server:
    """Gives at most `most` choices, and refuses more or leaves them out."""

    def __init__(self, most: int, *, refuses: bool = False, words: str = TOO_MANY) -> None:
        self.most, self.refuses, self.words = most, refuses, words
        self.bodies: list[Any] = []

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        wanted = body.get("n", 1)
        if wanted > self.most and self.refuses:
            return web.json_response({"error": {"message": self.words, "type": "invalid_request_error"}}, status=400)
        said = f"said {len(self.bodies)}"
        chunks: list[Any] = []
        for index in range(min(wanted, self.most)):
            delta = {"text": said} if "prompt" in body else {"delta": {"content": said}}
            chunks.append({"choices": [{"index": index, **delta, "finish_reason": "stop"}]})
        usage = {"prompt_tokens": 3, "completion_tokens": 2 * len(chunks), "total_tokens": 0}
        chunks.append({"choices": [], "usage": usage})
        text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
        return web.Response(text=f"{text}data: [DONE]\n\n", content_type="text/event-stream")


async def _events(server: Server, payload: GenerationPayload, engine: EngineParameters = ATTACHED) -> list[Any]:
    async with http_server(server.answer) as url, upstream(url, engine) as client:
        call = CallInfo(request_id="r", traceparent=new_traceparent())
        return [event async for frame in client.generate(payload, call) for event in frame]


def _chat(count: int, **fields: Any) -> chat_pb2.ChatPayload:
    payload = chat_pb2.ChatPayload(choice_count=count, **fields)
    payload.messages.add(role=chat_pb2.ROLE_USER).content.add(text="hi")
    return payload


def _asked(server: Server) -> list[int]:
    return [body.get("n", 1) for body in server.bodies]


@pytest.mark.parametrize(
    ("server", "asked"),
    [
        (Server(8), [3]),
        (Server(1), [3, 1, 1]),
        (Server(2), [3, 1]),
        (Server(2, refuses=True), [3, 1, 2]),
        (Server(1, refuses=True, words="Only one completion choice is supported: 'n' must be 1"), [3, 1, 2, 1, 1]),
    ],
    ids=["all", "one", "two", "slots", "refuses"],
)
async def test_choices_that_a_server_does_not_give_are_requested_again(server: Server, asked: list[int]) -> None:
    events = await _events(server, _chat(3))
    assert _asked(server) == asked
    ends = sorted(event.delta.index for event in events if event.delta.finish_reason)
    assert ends == [0, 1, 2]
    (finished,) = [event.finished.receipt for event in events if event.HasField("finished")]
    (usage,) = [event.usage for event in events if event.HasField("usage")]
    answers = sum(not (server.refuses and count > server.most) for count in asked)
    assert (usage.completion_tokens, usage.prompt_tokens) == (6, 3 * answers)
    assert finished.usage == usage
    assert events[-1].HasField("finished")


async def test_further_choices_have_another_seed() -> None:
    server, payload = Server(1), _chat(2)
    payload.sampling.seed = 7
    await _events(server, payload)
    assert [body["seed"] for body in server.bodies] == [7, 8]


async def test_choices_of_a_completion_are_completed_too_and_those_of_several_prompts_are_not() -> None:
    payload = completion_pb2.CompletionPayload(choice_count=2)
    payload.prompts.add(text="a")
    server = Server(1)
    events = await _events(server, payload)
    assert sorted(event.delta.index for event in events if event.delta.text) == [0, 1]
    payload.prompts.add(text="b")
    with fails(Reason.BACKEND_PROTOCOL_ERROR, "of 4 choices"):
        await _events(Server(1), payload)


async def test_refusal_of_something_else_is_not_sent_again() -> None:
    server = Server(0, refuses=True, words="this model cannot read images")
    with fails(Reason.BACKEND_REJECTED):
        await _events(server, _chat(2))
    assert _asked(server) == [2]


async def test_broken_later_choice_is_an_error() -> None:
    server = Server(1)

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if server.bodies:
            return web.Response(text='data: {"choices": []}\n\n', content_type="text/event-stream")
        return await server.answer(request)

    async with http_server(answer) as url, upstream(url, ATTACHED) as client:
        call = CallInfo(request_id="r", traceparent=new_traceparent())
        with fails(Reason.BACKEND_PROTOCOL_ERROR):
            [frame async for frame in client.generate(_chat(2), call)]
