"""Valid and invalid embeddings of a server."""

import asyncio
import base64
import json
import math
import struct
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from runner_svc.backend.port import CallInfo
from runner_svc.openai_upstream.client import Endpoint, OpenAiHttp
from runner_svc.policy.parameters import ParameterProfile
from runner_svc.policy.timeouts import TimeoutProfile
from runner_svc.runtimes.llama_server.runtime import PARAMETERS
from weft.api.common.v1 import completion_pb2, embedding_pb2
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

TEXT = completion_pb2.PromptInput(text="a")
PAYLOAD = embedding_pb2.EmbeddingPayload(inputs=[completion_pb2.PromptInput(text=text) for text in ("a", "b")])
CALL = CallInfo(request_id="r1", traceparent="")


async def _unexplained(_: Reason) -> None:
    return None


@asynccontextmanager
async def _answering(reply: dict[str, Any]) -> AsyncGenerator[OpenAiHttp]:
    body = json.dumps(reply).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head % len(body) + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1")
    port = server.sockets[0].getsockname()[1]
    http = OpenAiHttp(
        Endpoint(base_url=f"http://127.0.0.1:{port}", parameters=ParameterProfile(engine=PARAMETERS)),
        TimeoutProfile(),
        _unexplained,
    )
    try:
        yield http
    finally:
        await http.close()
        server.close()


def _reply(*places: int, tokens: int = 2) -> dict[str, Any]:
    data = [{"index": place, "embedding": [float(place)]} for place in places]
    return {"data": data, "usage": {"prompt_tokens": tokens}}


async def test_vectors_are_in_input_order() -> None:
    async with _answering(_reply(1, 0)) as http:
        result = await http.embed(PAYLOAD, CALL)
    assert [list(vector.values) for vector in result.embeddings] == [[0.0], [1.0]]


@pytest.mark.parametrize("reply", [_reply(0, 2**40), _reply(1, 1), _reply(0)])
async def test_invalid_index_is_a_protocol_error(reply: dict[str, Any]) -> None:
    async with _answering(reply) as http:
        with pytest.raises(WeftError) as refused:
            await http.embed(PAYLOAD, CALL)
    assert refused.value.reason is Reason.BACKEND_PROTOCOL_ERROR


_VECTORS = [{"embedding": [0.0]}, {"embedding": [1.0]}]


@pytest.mark.parametrize("usage", [{}, {"usage": None}, {"usage": {"prompt_tokens": -5}}, {"usage": [2]}])
@pytest.mark.parametrize("places", [({}, {}), ({"index": 0}, {"index": 0}), ({"index": None}, {"index": "b"})])
async def test_vectors_without_usage_or_index_are_accepted(
    places: tuple[dict[str, Any], ...], usage: dict[str, Any]
) -> None:
    data = [place | vector for place, vector in zip(places, _VECTORS, strict=True)]
    async with _answering({"data": data, **usage}) as http:
        result = await http.embed(PAYLOAD, CALL)
    assert [list(vector.values) for vector in result.embeddings] == [[0.0], [1.0]]
    assert result.usage.prompt_tokens == 0


@pytest.mark.parametrize("usage", [{"prompt_tokens": 2.0}, {"prompt_tokens": None, "total_tokens": 2}])
async def test_usage_as_floats_or_only_a_total_is_accepted(usage: dict[str, Any]) -> None:
    async with _answering({"data": _VECTORS, "usage": usage}) as http:
        assert (await http.embed(PAYLOAD, CALL)).usage.prompt_tokens == 2


async def test_vectors_in_base64_are_read() -> None:
    """Some servers write them unasked; they were refused."""
    text = base64.b64encode(struct.pack("<2f", 0.5, -2.0)).decode()
    async with _answering({"data": [{"embedding": text}]}) as http:
        result = await http.embed(embedding_pb2.EmbeddingPayload(inputs=[TEXT]), CALL)
    assert list(result.embeddings[0].values) == [0.5, -2.0]
    for wrong in ("", "AAA=", "no base64", base64.b64encode(struct.pack("<2f", 1.0, math.nan)).decode()):
        async with _answering({"data": [{"embedding": wrong}]}) as http:
            with pytest.raises(WeftError, match="a vector that is empty or holds"):
                await http.embed(embedding_pb2.EmbeddingPayload(inputs=[TEXT]), CALL)


async def test_an_error_in_an_answer_of_status_200_is_the_error() -> None:
    """It was shown as embeddings that are malformed."""
    async with _answering({"error": {"message": "the input is empty", "code": 400}}) as http:
        with pytest.raises(WeftError, match="the input is empty"):
            await http.embed(PAYLOAD, CALL)
