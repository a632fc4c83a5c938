"""What the gateway says on a stream before its first content: queue, loading, prefill, and that it is there."""

import asyncio

from gateway_script import (
    ScriptedDispatcher,
    Step,
    hello,
    queued,
    serving,
)

from gateway.config import GatewayConfig
from weft.api.common.v1 import event_pb2
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

CHAT = "/v1/chat/completions"
STREAM = b'{"model":"tiny","stream":true,"messages":[{"role":"user","content":"hi"}]}'
QUICK = GatewayConfig(port=0, headers_within_seconds=0.02, sse_keepalive_seconds=0.02)


def loading() -> event_pb2.InferenceEvent:
    event = event_pb2.InferenceEvent(loading=event_pb2.Loading(stage="reading\nweights", progress=0.5))
    event.loading.eta.FromSeconds(12)
    return event


async def test_waiting_stream_sends_comments_then_the_answer() -> None:
    gate = asyncio.Event()
    progress = event_pb2.InferenceEvent(progress=event_pb2.Progress(prompt_tokens=900, processed_tokens=512))
    steps: list[Step] = [[queued()], [loading()], gate, [progress], *hello()]
    async with serving(ScriptedDispatcher(steps), config=QUICK) as gateway, gateway.connection() as (reader, writer):
        writer.write(gateway.post(CHAT, STREAM))
        seen = await reader.readuntil(b": keepalive\n\n")
        seen += await reader.readuntil(b": keepalive\n\n")
        gate.set()
        seen += await reader.readuntil(b"data: [DONE]\n\n")
    assert b"200 OK" in seen
    assert b": queued position=3 reason=every slot is taken\n\n" in seen
    assert b": loading progress=0.50 eta_seconds=12 stage=reading weights\n\n" in seen
    assert b": prefill 512/900 tokens\n\n" in seen
    assert seen.index(b": queued") < seen.index(b": loading") < seen.index(b": keepalive") < seen.index(b'"role"')


async def test_rejection_after_the_status_line_is_the_last_event() -> None:
    gate = asyncio.Event()
    rejection = WeftError(Reason.QUEUE_TIMEOUT, "waited too long")
    async with (
        serving(ScriptedDispatcher([[queued()], gate, rejection]), config=QUICK) as gateway,
        gateway.connection() as (reader, writer),
    ):
        writer.write(gateway.post(CHAT, STREAM))
        await reader.readuntil(b": keepalive\n\n")
        gate.set()
        rest = await reader.readuntil(b"0\r\n\r\n")
    assert b"queue_timeout" in rest
    assert b"[DONE]" not in rest
