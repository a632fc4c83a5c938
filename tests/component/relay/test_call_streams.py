"""Calls that share a stream to one server: what ends one of them, and what ends all."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from kit.refusals import refused
from relay_harness import prompt

from weft.api.runner.v1 import generation_service_pb2
from weft.dispatch.operation_table import CHAT
from weft.kernel.channels.rpc import ChannelPool, new_server
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.link import carried_calls
from weft.link.carried_calls import CallStreams, CarriedCall, CarriedCalls

GENERATE = CHAT.runner_rpc
Serve = Callable[[Any, Any], Any]


@asynccontextmanager
async def serving(folder: Path, serve: Serve) -> AsyncIterator[str]:
    """The address of a runner that serves calls so."""
    server, address = new_server(), f"unix:{folder}/runner.sock"
    CarriedCalls({GENERATE: serve}).add_to_server(server)
    server.add_insecure_port(address)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


@pytest.fixture
async def streams() -> AsyncIterator[CallStreams]:
    channels = ChannelPool()
    yield CallStreams(channels)
    await channels.close()


async def begun(streams: CallStreams, address: str, seconds: float = 10.0) -> CarriedCall:
    call = (await streams.to(address)).call(GENERATE, (), seconds)
    await call.write(prompt())
    return call


async def say(_request: Any, context: Any) -> None:
    await context.write(generation_service_pb2.GenerateResponse())


async def never_end(_request: Any, _context: Any) -> None:
    await asyncio.Event().wait()


async def test_deadline_ends_its_call_alone(streams: CallStreams, tmp_path: Path) -> None:
    async with serving(tmp_path, never_end) as address:
        long, short = await begun(streams, address), await begun(streams, address, 0.05)
        with refused(Reason.DEADLINE_EXCEEDED):
            await short.read()
        assert (long.done(), short.done(), short.is_answered) == (False, True, False)


async def test_lost_stream_ends_its_calls_and_the_next_call_opens_another(streams: CallStreams, tmp_path: Path) -> None:
    async with serving(tmp_path, never_end) as address:
        calls = [await begun(streams, address) for _ in range(3)]
        reading = [asyncio.create_task(call.read()) for call in calls]
        await asyncio.sleep(0.05)
    for each in reading:
        with refused(Reason.WORKER_LOST):
            await each
    async with serving(tmp_path, say) as address:
        # gRPC connects again after a pause.
        for _ in range(100):
            call = await begun(streams, address)
            try:
                assert await call.read() == generation_service_pb2.GenerateResponse()
                break
            except WeftError:
                await asyncio.sleep(0.05)
        assert await call.read() is grpc.aio.EOF
        assert call.is_answered


async def test_message_that_cannot_be_read_is_a_lost_runner(streams: CallStreams, tmp_path: Path) -> None:
    """It was an internal error of the mesh."""

    async def garble(_request: Any, context: Any) -> None:
        await context.write(SimpleNamespace(SerializeToString=lambda: b"\xff"))

    async with serving(tmp_path, garble) as address:
        call = await begun(streams, address)
        with refused(Reason.WORKER_LOST):
            await call.read()


async def test_streams_to_many_addresses_are_bounded(streams: CallStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carried_calls, "MAX_CHANNELS", 3)
    found = [await streams.to(f"unix:/nowhere/{number}") for number in range(5)]
    assert await streams.to("unix:/nowhere/4") is found[4]
    assert await streams.to("unix:/nowhere/0") is not found[0]
