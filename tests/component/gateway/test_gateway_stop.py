"""The stop of a gateway: what runs is finished, what waits is answered, what takes too long ends with an error."""

import asyncio
import socket
from collections.abc import AsyncGenerator
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
    unchunked,
)
from registry_script import ScriptedRegistry, event

from weft.api.registry.v1.event_pb2 import Event
from weft.api.registry.v1.registry_service_pb2 import WatchEventsRequest

CHAT = "/v1/chat/completions"
STREAM = b'{"model":"tiny","stream":true,"messages":[{"role":"user","content":"hi"}]}'
UNARY = b'{"model":"tiny","messages":[{"role":"user","content":"hi"}]}'


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
        stopping = asyncio.create_task(gateway.service.stop(grace_seconds=60))
        # Idle connections are closed after the listeners.
        assert await idle_reader.read() == b""
        with pytest.raises(ConnectionRefusedError):
            await gateway.request("GET", "/health")
        gate.set()
        rest = await reader.read()
        await asyncio.wait_for(stopping, 20)
    assert b"data: [DONE]" in rest


async def test_request_on_a_connection_idle_at_stop_is_answered() -> None:
    async with serving(ScriptedDispatcher(hello())) as gateway, gateway.connection() as (reader, writer):
        await gateway.request("GET", "/health")
        stopping = asyncio.create_task(gateway.service.stop(grace_seconds=60))
        while await _accepts(gateway):  # noqa: ASYNC110 - what it looks at has no event
            await asyncio.sleep(0)
        writer.write(gateway.post(CHAT, STREAM))
        answer = await reader.read()
        await asyncio.wait_for(stopping, 20)
    assert b"data: [DONE]" in answer


async def _accepts(gateway: RunningGateway) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.service.port)
    except ConnectionRefusedError:
        return False
    writer.close()
    return True


async def test_requests_on_unaccepted_connections_at_stop_are_answered() -> None:
    async with serving(ScriptedDispatcher(hello())) as gateway:
        # The event loop accepts none of them before the stop: nothing here waits for it.
        with ExitStack() as sockets:
            callers = [sockets.enter_context(socket.socket()) for _ in range(20)]
            for caller in callers:
                caller.connect(("127.0.0.1", gateway.service.port))
                caller.sendall(gateway.post("/v1/chat/completions", UNARY))
                caller.setblocking(False)
            await asyncio.wait_for(gateway.service.stop(grace_seconds=60), 20)
            answers = [caller.recv(65_536) for caller in callers]
    assert {answer.split(b"\r\n", 1)[0].strip() for answer in answers} == {b"HTTP/1.1 200 OK"}


@pytest.mark.parametrize("began", [True, False])
async def test_stop_ends_unfinished_requests_with_an_error(began: bool) -> None:
    never = asyncio.Event()
    first: list[Step] = [[delta("Hel")]] if began else [[queued()]]
    async with serving(ScriptedDispatcher([*first, never])) as gateway, gateway.connection() as (reader, writer):
        writer.write(gateway.post(CHAT, STREAM))
        await gateway.dispatcher.was_asked.wait()
        seen = await reader.readuntil(b'"Hel"}') if began else b""
        await asyncio.wait_for(gateway.service.stop(grace_seconds=0.05), 20)
        seen += await reader.read()
        assert gateway.dispatcher.was_closed.is_set()
    if began:
        assert b"shutting_down" in unchunked(seen.partition(b"\r\n\r\n")[2])
        assert b"[DONE]" not in seen
    else:
        response = RawResponse.parse(seen)
        assert response.status == 503
        assert response.error["code"] == "shutting_down"


class ClosedDispatcher(ScriptedDispatcher):
    """Raises what gRPC raises where the channel is closed under a call."""

    def call(self, *_: Any, **__: Any) -> Any:
        raise asyncio.CancelledError


class ClosedRegistry(ScriptedRegistry):
    """Raises the same in its watch, after an event."""

    async def watch_events(self, wanted: WatchEventsRequest) -> AsyncGenerator[Event]:
        yield event(1)
        raise asyncio.CancelledError


async def test_stream_cut_by_its_closed_channel_reports_a_lost_connection() -> None:
    async with serving(registry=ClosedRegistry()) as gateway:
        answer = await gateway.request("GET", "/api/v1/events?watch=1")
    assert b'"code":"service_unavailable"' in answer.body.splitlines()[-2]


async def test_call_cancelled_by_its_closed_channel_is_reported_as_a_lost_connection() -> None:
    """A gateway said that it was shutting down when the channel to a lost router was closed under a call."""
    async with serving(ClosedDispatcher()) as gateway:
        response = await gateway.request("POST", CHAT, STREAM)
    assert response.status == 503
    assert response.error["code"] == "service_unavailable"
