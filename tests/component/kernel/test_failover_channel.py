"""Calls over two real servers of which one serves, that change their roles, end, and come back."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from weft.kernel.channels.chosen_channel import PickedChannel
from weft.kernel.channels.failover_channel import BlockingFailoverChannel, FailoverChannel
from weft.kernel.channels.rpc import new_server, open_blocking_channel, open_channel
from weft.kernel.channels.tls_channel import ChannelSecurity
from weft.kernel.services.service_lifecycle import Health

WAIT_SECONDS = 20.0


class Named:
    """A server that answers with its name, and streams it until it ends."""

    def __init__(self, folder: Path, name: str, *, watchable: bool = True) -> None:
        self.name = name
        self.address = f"unix:{folder}/{name}"
        self._watchable = watchable
        self.health = Health()
        self._server: grpc.aio.Server | None = None

    async def start(self, *, serving: bool) -> None:
        self.health = Health()
        server = self._server = new_server()
        methods: dict[str, Any] = {
            "Name": grpc.unary_unary_rpc_method_handler(self._answer),
            "Names": grpc.unary_stream_rpc_method_handler(self._stream),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Named", methods),))
        if self._watchable:
            self.health.register(server, ())
        else:
            self.health.register_check(server)
        self.set(serving=serving)
        server.add_insecure_port(self.address)
        await server.start()

    def set(self, *, serving: bool) -> None:
        self.health.set_serving((), serving=serving)

    async def stop(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(None)

    async def _answer(self, _: bytes, context: Any) -> bytes:
        del context
        return self.name.encode()

    async def _stream(self, _: bytes, context: Any) -> AsyncIterator[bytes]:
        del context
        yield self.name.encode()
        await asyncio.Event().wait()


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[Named, Named]]:
    async with AsyncExitStack() as ends:
        servers = Named(tmp_path, "a"), Named(tmp_path, "b")
        for server in servers:
            ends.push_async_callback(server.stop)
        yield servers


def channel_over(*servers: Named) -> FailoverChannel:
    channel = open_channel(",".join(each.address for each in servers))
    assert isinstance(channel, FailoverChannel)
    return channel


async def name_at(channel: grpc.aio.Channel) -> str:
    method: Any = channel.unary_unary("/test.Named/Name")
    answer = await method(b"", timeout=WAIT_SECONDS)
    return bytes(answer).decode()


async def until_name(channel: grpc.aio.Channel, name: str) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            with suppress(grpc.aio.AioRpcError):
                if await name_at(channel) == name:
                    return
            await asyncio.sleep(0.02)


async def test_first_call_reaches_the_serving_server(pair: tuple[Named, Named]) -> None:
    a, b = pair
    await a.start(serving=False)
    await b.start(serving=True)
    async with channel_over(a, b) as channel:
        assert [await name_at(channel) for _ in range(3)] == ["b", "b", "b"]


async def test_first_call_does_not_wait_for_a_missing_server(pair: tuple[Named, Named]) -> None:
    a, b = pair
    await b.start(serving=True)
    async with channel_over(a, b) as channel:
        assert await name_at(channel) == "b"


async def test_calls_follow_the_serving_role_and_listeners_are_notified(pair: tuple[Named, Named]) -> None:
    a, b = pair
    await a.start(serving=True)
    await b.start(serving=False)
    moves = list[str]()
    async with channel_over(a, b) as channel:
        channel.on_move(lambda: moves.append(channel.address))
        assert await name_at(channel) == "a"
        # As a frozen owner, `a` does not say that it serves no more.
        b.set(serving=True)
        await until_name(channel, "b")
        assert moves == [b.address]


async def test_listeners_are_notified_when_a_server_returns(pair: tuple[Named, Named]) -> None:
    a, b = pair
    await a.start(serving=True)
    await b.start(serving=False)
    moves = list[str]()
    async with channel_over(a, b) as channel:
        channel.on_move(lambda: moves.append(channel.address))
        assert await name_at(channel) == "a"
        await a.stop()
        # It begins another life before the other one takes over.
        await a.start(serving=True)
        async with asyncio.timeout(WAIT_SECONDS):
            while not moves:  # noqa: ASYNC110 - a callback of the channel
                await asyncio.sleep(0.02)
        assert await name_at(channel) == "a"
    assert moves == [a.address]


async def test_watch_cancelled_by_its_connection_restarts(pair: tuple[Named, Named]) -> None:
    a, b = pair
    await a.start(serving=True)
    await b.start(serving=False)
    # As SecuredChannel does with connections of a certificate that was replaced.
    connections = [open_channel(b.address)]
    channels = {a.address: open_channel(a.address), b.address: PickedChannel(lambda: connections[-1])}
    async with FailoverChannel(channels) as channel:
        assert await name_at(channel) == "a"
        connections.append(open_channel(b.address))
        await connections[0].close(None)
        b.set(serving=True)
        await until_name(channel, "b")
        await connections[1].close(None)


async def test_calls_and_watches_fail_over_after_a_death_and_back(pair: tuple[Named, Named]) -> None:
    a, b = pair
    await a.start(serving=True)
    await b.start(serving=False)
    async with channel_over(a, b) as channel:
        assert await name_at(channel) == "a"
        stream = channel.unary_stream("/test.Named/Names")(b"")
        assert bytes(await stream.read()) == b"a"
        await a.stop()
        with pytest.raises(grpc.aio.AioRpcError):
            await stream.read()
        b.set(serving=True)
        await until_name(channel, "b")
        stream = channel.unary_stream("/test.Named/Names")(b"")
        assert bytes(await stream.read()) == b"b"
        stream.cancel()
        await a.start(serving=False)
        await b.stop()
        a.set(serving=True)
        await until_name(channel, "a")


async def test_server_without_health_watch_is_polled(tmp_path: Path) -> None:
    a, b = Named(tmp_path, "a", watchable=False), Named(tmp_path, "b", watchable=False)
    await a.start(serving=False)
    await b.start(serving=True)
    try:
        async with channel_over(a, b) as channel:
            assert await name_at(channel) == "b"
    finally:
        await a.stop()
        await b.stop()


async def test_channel_without_a_server_fails_its_calls(pair: tuple[Named, Named]) -> None:
    async with channel_over(*pair) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await name_at(channel)
    assert failure.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("api_key", ["", "wk_secret"])
async def test_blocking_channel_checks_health_before_the_first_call_and_after_a_failure(
    pair: tuple[Named, Named], api_key: str
) -> None:
    a, b = pair
    await a.start(serving=False)
    await b.start(serving=True)
    channel = open_blocking_channel(f"{a.address},{b.address}", ChannelSecurity(api_key=api_key))
    assert isinstance(channel, BlockingFailoverChannel)

    def name() -> str:
        assert threading.current_thread() is not threading.main_thread()
        try:
            return bytes(channel.unary_unary("/test.Named/Name")(b"", timeout=WAIT_SECONDS)).decode()
        except grpc.RpcError as error:
            code: Any = error
            return str(code.code().name)

    with channel:
        assert await asyncio.to_thread(name) == "b"
        await b.stop()
        a.set(serving=True)
        assert await asyncio.to_thread(name) == "UNAVAILABLE"
        assert await asyncio.to_thread(name) == "a"
