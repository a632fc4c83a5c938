"""Calls that are carried over one stream to a runner on this machine: they mean what calls of their own mean.

Their frames travel over a pipe beside the stream, or over the stream itself: each test runs with both.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from kit.called_runner import METADATA, SOON_SECONDS, CalledRunner, error_of_call, read_text

from weft.api.common.v1 import chat_pb2
from weft.api.runner.v1 import generation_service_pb2 as pb
from weft.dispatch.operations import CHAT
from weft.kernel.reasons import Reason
from weft.kernel.rpc import MAX_CHANNELS, ChannelPool, new_server
from weft.link.carried_calls import CarriedCalls
from weft.link.carriers import MAX_CARRIED_BYTES, CarriedCall, Carriers
from weft.link.own_calls import OwnCall


class Runner(CalledRunner):
    """One that offers pipes, or none."""

    def __init__(self, *, offers_pipes: bool = True) -> None:
        super().__init__()
        self.offers_pipes = offers_pipes


@pytest.fixture(params=[True, False], ids=["pipe", "stream"])
def runner(request: pytest.FixtureRequest) -> Runner:
    return Runner(offers_pipes=request.param)


@asynccontextmanager
async def _carried(
    folder: Path, runner: Runner, *, max_channels: int = MAX_CHANNELS
) -> AsyncGenerator[tuple[Carriers, str, CarriedCalls, ChannelPool]]:
    server, channels = new_server(), ChannelPool(max_channels)
    served = CarriedCalls(offers_pipes=runner.offers_pipes)
    served.serve(CHAT.runner_rpc, runner.generate)
    served.add_to_server(server)
    address = f"unix:{folder / 'runner.sock'}"
    server.add_insecure_port(address)
    await server.start()
    try:
        yield Carriers(channels), address, served, channels
    finally:
        await channels.close()
        await server.stop(grace=0.5)


async def _begin(
    carriers: Carriers, address: str, agent: str = "", seconds: float | None = None
) -> CarriedCall | OwnCall:
    """A carried call, as soon as the stream is accepted."""
    async with asyncio.timeout(SOON_SECONDS):
        while (  # noqa: ASYNC110 - the stream is opened in the background
            call := carriers.call(address, CHAT.runner_rpc, pb.GenerateRequest(agent=agent), METADATA, seconds)
        ) is None:
            await asyncio.sleep(0.005)
    return call


async def test_a_carried_call_has_its_messages_in_order_its_metadata_and_its_deadline(
    tmp_path: Path, runner: Runner
) -> None:
    async with _carried(tmp_path, runner) as (carriers, address, _, _):
        assert await read_text(await _begin(carriers, address, seconds=30.0)) == "abc"
    assert runner.metadata == METADATA
    assert runner.seconds_left is not None
    assert 0 < runner.seconds_left <= 30


async def test_many_calls_run_at_once_on_one_stream(tmp_path: Path, runner: Runner) -> None:
    async with _carried(tmp_path, runner) as (carriers, address, served, _):
        calls = [await _begin(carriers, address) for _ in range(200)]
        assert await asyncio.gather(*map(read_text, calls)) == ["abc"] * 200
        (link,) = served._links
        assert (link._pipe is not None) is runner.offers_pipes


async def test_the_error_of_a_carried_call_has_its_reason_and_its_details(tmp_path: Path, runner: Runner) -> None:
    async with _carried(tmp_path, runner) as (carriers, address, _, _):
        error = await error_of_call(await _begin(carriers, address, "fail"))
        assert (error.reason, error.message) == (Reason.NO_SLOT_AVAILABLE, "all 2 slots are taken")
        assert error.retry_after_seconds == 2.5
        assert (await error_of_call(await _begin(carriers, address, "fault"))).reason is Reason.INTERNAL
        assert await read_text(await _begin(carriers, address)) == "abc", "the stream goes on"


async def test_the_cancellation_of_a_carried_call_reaches_the_runner_and_no_other_call(
    tmp_path: Path, runner: Runner
) -> None:
    async with _carried(tmp_path, runner) as (carriers, address, _, _):
        call = await _begin(carriers, address, "hang")
        await asyncio.wait_for(runner.begun.wait(), SOON_SECONDS)
        beside = await _begin(carriers, address)
        call.cancel()
        await asyncio.wait_for(runner.cancelled.wait(), SOON_SECONDS)
        assert (await error_of_call(call)).reason is Reason.CANCELLED
        assert await read_text(beside) == "abc"


async def test_a_carried_call_ends_at_its_deadline_at_both_ends(tmp_path: Path, runner: Runner) -> None:
    async with _carried(tmp_path, runner) as (carriers, address, _, _):
        error = await error_of_call(await _begin(carriers, address, "hang", seconds=0.2))
        assert error.reason is Reason.DEADLINE_EXCEEDED
        await asyncio.wait_for(runner.cancelled.wait(), SOON_SECONDS)


async def test_the_end_of_the_stream_ends_its_calls_as_lost_and_the_next_call_opens_another(
    tmp_path: Path, runner: Runner
) -> None:
    async with _carried(tmp_path, runner) as (carriers, address, served, _):
        call = await _begin(carriers, address, "hang")
        await asyncio.wait_for(runner.begun.wait(), SOON_SECONDS)
        served.stop()
        assert (await error_of_call(call)).reason is Reason.WORKER_LOST
        assert await read_text(await _begin(carriers, address)) == "abc"


async def test_the_end_of_the_channels_ends_carried_calls(tmp_path: Path, runner: Runner) -> None:
    async with _carried(tmp_path, runner) as (carriers, address, _, channels):
        call = await _begin(carriers, address, "hang")
        await asyncio.wait_for(runner.begun.wait(), SOON_SECONDS)
        await channels.close()
        assert (await error_of_call(call)).reason is Reason.WORKER_LOST
        await asyncio.wait_for(runner.cancelled.wait(), SOON_SECONDS)


async def test_the_channel_of_a_stream_that_carries_calls_is_not_the_least_recently_used_one(
    tmp_path: Path, runner: Runner
) -> None:
    """A stream calls nothing on its channel, which was closed under it once there were too many others."""
    async with _carried(tmp_path, runner, max_channels=2) as (carriers, address, served, channels):
        await read_text(await _begin(carriers, address))
        (link,) = served._links
        for port in range(1, 5):
            call = carriers.call(address, CHAT.runner_rpc, pb.GenerateRequest(), METADATA, None)
            assert call is not None, "the stream goes on"
            await channels.get(f"127.0.0.1:{port}")
            assert await read_text(call) == "abc"
        assert served._links == {link}


async def test_a_large_request_is_not_carried(tmp_path: Path, runner: Runner) -> None:
    async with _carried(tmp_path, runner) as (carriers, address, _, _):
        await read_text(await _begin(carriers, address))
        large = pb.GenerateRequest(chat=chat_pb2.ChatPayload(), agent="a" * MAX_CARRIED_BYTES)
        assert carriers.call(address, CHAT.runner_rpc, large, METADATA, None) is None


async def test_a_runner_that_carries_nothing_is_asked_once_and_its_calls_are_rpcs(tmp_path: Path) -> None:
    asked = 0

    class Counter(grpc.aio.ServerInterceptor):
        async def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
            nonlocal asked
            asked += 1
            return await continuation(details)

    server, channels = new_server((Counter(),)), ChannelPool()
    address = f"unix:{tmp_path / 'runner.sock'}"
    server.add_insecure_port(address)
    await server.start()
    carriers = Carriers(channels)
    async with asyncio.timeout(SOON_SECONDS):
        while not carriers._refused:
            assert carriers.call(address, CHAT.runner_rpc, pb.GenerateRequest(), METADATA, None) is None
            await asyncio.sleep(0.005)
    assert carriers.call(address, CHAT.runner_rpc, pb.GenerateRequest(), METADATA, None) is None
    await asyncio.sleep(0.05)
    assert asked == 1
    await channels.close()
    await server.stop(grace=None)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "tls:host:1", "unix:/tmp/router.sock#runner=a"])
async def test_only_runners_behind_a_unix_socket_of_their_own_are_asked_to_carry(address: str) -> None:
    carriers = Carriers(ChannelPool())
    assert carriers.call(address, CHAT.runner_rpc, pb.GenerateRequest(), METADATA, None) is None
    assert not carriers._opening
