"""What a stream has before its first content, in every API: queue, loading, prefill, and that the gateway is there."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from gateway_script import ScriptedDispatcher, Step, hello, queued, serving

from gateway.gateway_config import GatewayConfig
from weft.api.common.v1 import event_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

QUICK = GatewayConfig(port=0, headers_within_seconds=0.02, sse_keepalive_seconds=0.02)
HI = [{"role": "user", "content": "hi"}]
KEEPALIVE = b": keepalive\n\n"
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
EMPTY_PIECE = b'"message":{"role":"assistant","content":""},"done":false}\n'
QUEUED = b": queued position=3 reason=every slot is taken\n\n"
LOADING = b": loading progress=0.50 eta_seconds=12 stage=reading weights\n\n"
PREFILL = b": prefill 512/900 tokens\n\n"
API = tuple[str, dict[str, Any], bytes, list[bytes], list[bytes]]
APIS: dict[str, API] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": HI},
        KEEPALIVE,
        [b"200 OK", QUEUED, LOADING, KEEPALIVE, PREFILL, b'"role"', b"data: [DONE]\n\n"],
        [b'"code":"queue_timeout"'],
    ),
    "messages": (
        "/v1/messages",
        {"messages": HI, "max_tokens": 9},
        PING,
        [b"200 OK", QUEUED, PING, b"message_start", b'{"type":"message_stop"}\n\n'],
        [b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"waited too long"'],
    ),
    "responses": (
        "/v1/responses",
        {"input": "hi"},
        KEEPALIVE,
        [
            b"200 OK",
            b"event: response.created",
            QUEUED,
            KEEPALIVE,
            b"response.output_item.added",
            b"response.completed",
        ],
        [b"event: response.created", b"response.in_progress", b"event: response.failed", b"event: error"],
    ),
    "ollama": ("/api/chat", {"messages": HI}, EMPTY_PIECE, [b"200 OK", EMPTY_PIECE, b"Hello", b'"done":true'], []),
}
"""Path and body, what says that the gateway is there, what a stream has in its order, and what a failing one has."""


def loading() -> event_pb2.InferenceEvent:
    event = event_pb2.InferenceEvent(loading=event_pb2.Loading(stage="reading\nweights", progress=0.5))
    event.loading.eta.FromSeconds(12)
    return event


async def streamed(api: API, *rest: Step) -> bytes:
    """The bytes of a stream that waits for two signs of life before `rest`."""
    path, body, alive, _, _ = api
    gate = asyncio.Event()
    script = ScriptedDispatcher([[queued()], [loading()], gate, *rest])
    async with serving(script, config=QUICK) as gateway, gateway.connection() as (reader, writer):
        writer.write(gateway.post(path, {"model": "tiny", "stream": True, **body}))
        seen = await reader.readuntil(alive) + await reader.readuntil(alive)
        gate.set()
        return seen + await reader.readuntil(b"0\r\n\r\n")


def is_in_order(seen: bytes, parts: Sequence[bytes]) -> bool:
    places = [seen.index(part) for part in parts]
    return all(one < other for one, other in pairwise(places))


@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
async def test_waiting_stream_shows_why_and_then_the_answer(api: API) -> None:
    progress = event_pb2.InferenceEvent(progress=event_pb2.Progress(prompt_tokens=900, processed_tokens=512))
    seen = await streamed(api, [progress], *hello())
    assert is_in_order(seen, api[3])
    assert (b"queued" in seen) == (QUEUED in api[3])
    assert seen.count(b"event: response.created") == (b"event: response.created" in api[3])


@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
async def test_rejection_after_the_status_line_is_the_last_event(api: API) -> None:
    seen = await streamed(api, WeftError(Reason.QUEUE_TIMEOUT, "waited too long"))
    assert is_in_order(seen, api[4])
    assert b"queue_timeout" in seen
    assert api[3][-1] not in seen
