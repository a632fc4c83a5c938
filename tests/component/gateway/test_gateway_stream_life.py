import asyncio
import json
import socket
from contextlib import ExitStack
from typing import Any

import pytest
from gateway_script import (
    RawResponse,
    RunningGateway,
    ScriptedDispatcher,
    Step,
    delta,
    finished,
    hello,
    queued,
    serving,
    started,
    unchunked,
)

from gateway.config import GatewayConfig
from weft.api.common.v1 import event_pb2
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

CHAT = "/v1/chat/completions"
STREAM = b'{"model":"tiny","stream":true,"messages":[{"role":"user","content":"hi"}]}'
UNARY = b'{"model":"tiny","messages":[{"role":"user","content":"hi"}]}'
EMBED = b'{"model":"tiny","input":"hi"}'
QUICK = GatewayConfig(port=0, headers_within_seconds=0.02, sse_keepalive_seconds=0.02)


def events_of(body: bytes) -> list[str]:
    """The data fields of a stream, in order."""
    return [part[6:] for part in body.decode().split("\n\n") if part.startswith("data: ")]


def loading() -> event_pb2.InferenceEvent:
    event = event_pb2.InferenceEvent(loading=event_pb2.Loading(stage="reading\nweights", progress=0.5))
    event.loading.eta.FromSeconds(12)
    return event


async def test_the_head_of_a_stream_forbids_buffering() -> None:
    async with serving() as gateway:
        response = await gateway.request("POST", CHAT, STREAM)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache, no-transform"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-request-id"].startswith("req-")
    assert "content-encoding" not in response.headers
    assert events_of(response.body)[-1] == "[DONE]"


async def test_a_silent_queue_sends_comments_and_then_the_answer() -> None:
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


async def test_the_preamble_waits_for_the_first_content() -> None:
    gate = asyncio.Event()
    async with (
        serving(ScriptedDispatcher([[started()], gate, *hello()]), config=QUICK) as gateway,
        gateway.connection() as (reader, writer),
    ):
        writer.write(gateway.post(CHAT, STREAM))
        before = await reader.readuntil(b": keepalive\n\n")
        gate.set()
        await reader.readuntil(b"data: [DONE]\n\n")
    assert b'"role"' not in before


async def test_the_first_content_is_written_at_once_and_with_its_preamble() -> None:
    gate = asyncio.Event()
    steps: list[Step] = [[delta("He")], gate, [delta("llo", finish="STOP"), finished()]]
    async with serving(ScriptedDispatcher(steps)) as gateway, gateway.connection() as (reader, writer):
        writer.write(gateway.post(CHAT, STREAM))
        seen = await asyncio.wait_for(reader.readuntil(b'"content":"He"}'), 0.5)
        gate.set()
        await reader.readuntil(b"data: [DONE]\n\n")
    first, second = seen.split(b"data: ")[1:]
    assert b'{"role":"assistant","content":""}' in first
    assert b'"role"' not in second


async def test_every_event_of_a_frame_is_one_write() -> None:
    words = [delta(f"w{number} ") for number in range(50)]
    steps: list[Step] = [[delta("first")], words, [delta(finish="STOP"), finished()]]
    async with serving(ScriptedDispatcher(steps)) as gateway, gateway.connection() as (reader, writer):
        writer.write(gateway.post(CHAT, STREAM))
        raw = await reader.readuntil(b"0\r\n\r\n")
    chunks = raw.partition(b"\r\n\r\n")[2].split(b"\r\n")[1::2]
    contents = [chunk.count(b'"content":"w') for chunk in chunks]
    assert 50 in contents


async def test_a_rejection_within_the_first_second_is_a_status_even_after_queueing() -> None:
    rejection = WeftError(Reason.QUEUE_TIMEOUT, "waited too long", retry_after_seconds=3)
    async with serving(ScriptedDispatcher([[queued()], [started()], rejection])) as gateway:
        response = await gateway.request("POST", CHAT, STREAM)
    assert response.status == 503
    assert json.loads(response.body)["error"]["code"] == "queue_timeout"
    assert response.headers["retry-after"] == "3"


async def test_a_rejection_after_the_status_line_is_the_last_event() -> None:
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


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (WeftError(Reason.SERVER_DIED, "the engine died"), "server_died"),
        (RuntimeError("secret /etc/path"), "internal"),
        ([], "backend_protocol_error"),
    ],
)
async def test_a_failure_after_content_ends_with_an_error_event_and_no_done(failure: Step, code: str) -> None:
    async with serving(ScriptedDispatcher([[delta("Hel")], failure])) as gateway:
        response = await gateway.request("POST", CHAT, STREAM)
        metrics = (await gateway.request("GET", "/metrics")).body.decode()
    events = events_of(response.body)
    error = json.loads(events[-1])["error"]
    assert response.status == 200
    assert error["code"] == code
    assert set(error) == {"message", "type", "param", "code"}
    assert b"[DONE]" not in response.body
    assert b"secret" not in response.body
    assert f'code="200",model="tiny",reason="{code}",surface="chat"' in metrics


async def test_a_failure_after_the_whole_answer_does_not_spoil_it() -> None:
    steps: list[Step] = [*hello(), WeftError(Reason.SERVICE_UNAVAILABLE, "the router is gone")]
    async with serving(ScriptedDispatcher(steps)) as gateway:
        response = await gateway.request("POST", CHAT, STREAM)
    assert events_of(response.body)[-1] == "[DONE]"


async def test_another_attempt_before_content_leaves_no_trace_in_the_answer() -> None:
    steps: list[Step] = [[started("one"), delta(finish="STOP")], [started("two")], *hello()[1:]]
    async with serving(ScriptedDispatcher(steps)) as gateway:
        response = await gateway.request("POST", CHAT, STREAM)
    chunks = [json.loads(event) for event in events_of(response.body)[:-1]]
    assert {chunk["model"] for chunk in chunks} == {"two"}
    assert sum(chunk["choices"][0]["finish_reason"] == "stop" for chunk in chunks) == 1


@pytest.mark.parametrize(("path", "body"), [(CHAT, STREAM), (CHAT, UNARY), ("/v1/embeddings", EMBED)])
async def test_a_client_that_hangs_up_in_silence_stops_the_work(path: str, body: bytes) -> None:
    never = asyncio.Event()
    async with serving(ScriptedDispatcher([[started()], never], vectors=never)) as gateway:
        async with gateway.connection() as (_, writer):
            writer.write(gateway.post(path, body))
            await gateway.dispatcher.was_asked.wait()
        await asyncio.wait_for(gateway.dispatcher.was_closed.wait(), 1)
        await require_counted(gateway, 'code="499"')


async def test_a_client_that_hangs_up_while_tokens_flow_stops_the_work() -> None:
    class Endless(list[Step]):
        def __iter__(self):  # type: ignore[no-untyped-def]  # noqa: ANN204
            while True:
                yield tick
                yield [delta("word ")]

    tick = asyncio.Event()
    tick.set()
    async with serving(ScriptedDispatcher(Endless())) as gateway:
        async with gateway.connection() as (reader, writer):
            writer.write(gateway.post(CHAT, STREAM))
            await reader.readuntil(b'"content":"word "')
        await asyncio.wait_for(gateway.dispatcher.was_closed.wait(), 1)


async def test_a_hang_up_reaches_the_running_request_of_a_pipeline() -> None:
    never = asyncio.Event()
    async with serving(ScriptedDispatcher([[started()], never])) as gateway:
        async with gateway.connection() as (_, writer):
            writer.write(gateway.post(CHAT, STREAM) + gateway.post(CHAT, STREAM))
            await gateway.dispatcher.was_asked.wait()
        await asyncio.wait_for(gateway.dispatcher.was_closed.wait(), 1)


async def test_a_reader_that_does_not_read_is_cut_off() -> None:
    class Endless(list[Step]):
        def __iter__(self):  # type: ignore[no-untyped-def]  # noqa: ANN204
            while True:
                yield [delta("x" * 60_000)]

    config = GatewayConfig(port=0, write_timeout_seconds=0.1)
    async with serving(ScriptedDispatcher(Endless()), config=config) as gateway:
        async with gateway.connection() as (_, writer):
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(gateway.post(CHAT, STREAM))
            await asyncio.wait_for(gateway.dispatcher.was_closed.wait(), 5)
        await require_counted(gateway, 'code="499"')


async def test_a_request_that_outlives_its_deadline_is_cut_off() -> None:
    config = GatewayConfig(port=0, request_timeout_seconds=0.02, deadline_slack_seconds=0.02)
    never = asyncio.Event()
    async with serving(ScriptedDispatcher([[queued()], never]), config=config) as gateway:
        for body in (STREAM, UNARY):
            response = await gateway.request("POST", CHAT, body)
            assert response.status == 504
            assert json.loads(response.body)["error"]["code"] == "deadline_exceeded"
            assert gateway.dispatcher.was_closed.is_set()


async def test_stop_lets_running_requests_finish() -> None:
    gate = asyncio.Event()
    steps: list[Step] = [[delta("Hel")], gate, [delta("lo", finish="STOP"), finished()]]
    async with (
        serving(ScriptedDispatcher(steps)) as gateway,
        gateway.connection() as (reader, writer),
        gateway.connection() as (idle_reader, _),
    ):
        writer.write(gateway.post(CHAT, STREAM))
        await reader.readuntil(b'"Hel"}')
        stopping = asyncio.create_task(gateway.service.stop(grace_seconds=5))
        # Idle connections are closed after the listeners.
        assert await idle_reader.read() == b""
        with pytest.raises(ConnectionRefusedError):
            await gateway.request("GET", "/health")
        gate.set()
        rest = await reader.read()
        await asyncio.wait_for(stopping, 1)
    assert b"data: [DONE]" in rest


async def test_a_request_on_a_connection_that_was_idle_when_the_stop_began_is_answered() -> None:
    async with serving(ScriptedDispatcher(hello())) as gateway, gateway.connection() as (reader, writer):
        await gateway.request("GET", "/health")
        stopping = asyncio.create_task(gateway.service.stop(grace_seconds=5))
        while await _accepts(gateway):  # noqa: ASYNC110 - what it looks at has no event
            await asyncio.sleep(0)
        writer.write(gateway.post(CHAT, STREAM))
        answer = await reader.read()
        await asyncio.wait_for(stopping, 2)
    assert b"data: [DONE]" in answer


async def _accepts(gateway: RunningGateway) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.service.port)
    except ConnectionRefusedError:
        return False
    writer.close()
    return True


async def test_requests_of_connections_that_wait_to_be_accepted_when_the_stop_begins_are_answered() -> None:
    async with serving(ScriptedDispatcher(hello())) as gateway:
        # The event loop accepts none of them before the stop: nothing here waits for it.
        with ExitStack() as sockets:
            callers = [sockets.enter_context(socket.socket()) for _ in range(20)]
            for caller in callers:
                caller.connect(("127.0.0.1", gateway.service.port))
                caller.sendall(gateway.post("/v1/chat/completions", UNARY))
                caller.setblocking(False)
            await asyncio.wait_for(gateway.service.stop(grace_seconds=5), 5)
            answers = [caller.recv(65_536) for caller in callers]
    assert {answer.split(b"\r\n", 1)[0].strip() for answer in answers} == {b"HTTP/1.1 200 OK"}


@pytest.mark.parametrize("began", [True, False])
async def test_stop_ends_what_does_not_finish_with_an_error(began: bool) -> None:
    never = asyncio.Event()
    first: list[Step] = [[delta("Hel")]] if began else [[queued()]]
    async with serving(ScriptedDispatcher([*first, never])) as gateway, gateway.connection() as (reader, writer):
        writer.write(gateway.post(CHAT, STREAM))
        await gateway.dispatcher.was_asked.wait()
        seen = await reader.readuntil(b'"Hel"}') if began else b""
        await asyncio.wait_for(gateway.service.stop(grace_seconds=0.05), 2)
        seen += await reader.read()
        assert gateway.dispatcher.was_closed.is_set()
    if began:
        assert b"shutting_down" in unchunked(seen.partition(b"\r\n\r\n")[2])
        assert b"[DONE]" not in seen
    else:
        response = RawResponse.parse(seen)
        assert response.status == 503
        assert json.loads(response.body)["error"]["code"] == "shutting_down"


async def require_counted(gateway: RunningGateway, label: str) -> None:
    """Wait until the metrics show `label`: the request's task ends a few steps after its dispatch was closed."""
    async with asyncio.timeout(2):
        while label not in (await gateway.request("GET", "/metrics")).body.decode():
            pass


class ClosedDispatcher(ScriptedDispatcher):
    """Raises what gRPC raises where the channel is closed under a call."""

    def call(self, *_: Any, **__: Any) -> Any:
        raise asyncio.CancelledError


async def test_a_call_that_its_closed_channel_cancelled_is_a_lost_connection_and_no_shutdown() -> None:
    """A gateway said that it was shutting down when the channel to a lost router was closed under a call."""
    async with serving(ClosedDispatcher()) as gateway:
        response = await gateway.request("POST", CHAT, STREAM)
    assert response.status == 503
    assert json.loads(response.body)["error"]["code"] == "service_unavailable"
