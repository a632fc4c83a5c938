"""The server of callers of this machine does what gRPC's own does, for clients of gRPC."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from weft.kernel.rpc import new_server, open_channel
from weft.kernel.rpc_server.server import LocalServer, takes
from weft.kernel.service import Health

SERVERS: dict[str, Callable[[], grpc.aio.Server]] = {"grpc": new_server, "local": LocalServer}


class Handlers:
    """Handlers of each kind; what became of `wait`."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.ends: asyncio.Queue[str] = asyncio.Queue()

    async def echo(self, _: object, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            await context.write(message)

    async def join(self, messages: AsyncIterator[bytes], _: object) -> bytes:
        return b"".join([each async for each in messages])

    async def count(self, request: bytes, _: object) -> AsyncIterator[bytes]:
        for number in range(int(request)):
            yield b"%d" % number

    async def refuse(self, _: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.NOT_FOUND, "no café: 100 %")
        return b"never"

    async def fail(self, _: bytes, __: object) -> bytes:
        raise ValueError("secret")

    async def head(self, _: bytes, context: Any) -> bytes:
        return str(dict(context.invocation_metadata())["x-own"]).encode()

    async def name(self, _: bytes, context: Any) -> bytes:
        return str(context.peer()).rpartition(":")[0].encode()

    async def wait(self, _: bytes, __: object) -> bytes:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.ends.put_nowait("cancelled")
            raise
        return b"never"

    async def listen(self, _: object, context: Any) -> None:
        self.begun.set()
        while await context.read() is not grpc.aio.EOF:
            pass
        self.ends.put_nowait("read the end")

    def all(self) -> dict[str, Any]:
        unary, streams = grpc.unary_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        return {
            "Echo": streams(self.echo),
            "Join": grpc.stream_unary_rpc_method_handler(self.join),
            "Count": grpc.unary_stream_rpc_method_handler(self.count),
            "Refuse": unary(self.refuse),
            "Fail": unary(self.fail),
            "Head": unary(self.head),
            "Name": unary(self.name),
            "Wait": unary(self.wait),
            "Listen": streams(self.listen),
        }


@asynccontextmanager
async def serving(kind: str) -> AsyncIterator[tuple[grpc.aio.Server, Handlers, Any]]:
    server, handlers, health = SERVERS[kind](), Handlers(), Health()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.B", handlers.all()),))
    health.register(server, ["a.B"])
    health.set_live()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            yield server, handlers, channel
    finally:
        await server.stop(0)


@pytest.fixture(params=sorted(SERVERS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_messages_of_any_size_come_back_in_order(kind: str) -> None:
    async with serving(kind) as (_, _, channel):
        call = channel.stream_stream("/a.B/Echo")()
        for size in (0, 1, 16_379, 16_384, 70_000, 5_000_000):
            sent = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
            await call.write(sent)
            assert await call.read() == sent
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


async def test_a_caller_that_reads_late_gets_everything(kind: str) -> None:
    async with serving(kind) as (_, _, channel):
        call = channel.stream_stream("/a.B/Echo")()

        async def write() -> None:
            for number in range(20):
                await call.write(bytes((number,)) * 1_000_000)
            await call.done_writing()

        writing = asyncio.create_task(write())
        await asyncio.sleep(0.1)
        assert [each[0] async for each in call] == list(range(20))
        await writing


async def test_calls_of_each_kind_are_served_side_by_side(kind: str) -> None:
    async with serving(kind) as (_, _, channel):

        async def one(number: int) -> None:
            counted = [each async for each in channel.unary_stream("/a.B/Count")(b"%d" % number)]
            assert counted == [b"%d" % each for each in range(number)]
            assert await channel.stream_unary("/a.B/Join")(iter((b"a", b"b", b"%d" % number))) == b"ab%d" % number

        await asyncio.gather(*(one(number) for number in range(40)))


async def test_metadata_and_statuses_arrive(kind: str) -> None:
    async with serving(kind) as (_, _, channel):
        head = channel.unary_unary("/a.B/Head")
        assert await head(b"", metadata=(("x-own", "1"),)) == b"1"
        assert await channel.unary_unary("/a.B/Name")(b"") == b"ipv4:127.0.0.1"
        found = []
        for path in ("/a.B/Refuse", "/a.B/Fail", "/a.B/None"):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary(path)(b"")
            found.append((refused.value.code(), refused.value.details()))
    assert found[0] == (grpc.StatusCode.NOT_FOUND, "no café: 100 %")
    assert found[1][0] is grpc.StatusCode.UNKNOWN
    assert found[2][0] is grpc.StatusCode.UNIMPLEMENTED


async def test_a_caller_that_leaves_ends_its_call(kind: str) -> None:
    async with serving(kind) as (_, handlers, channel):
        call = channel.unary_unary("/a.B/Wait")(b"")
        await handlers.begun.wait()
        call.cancel()
        assert await asyncio.wait_for(handlers.ends.get(), 5.0) == "cancelled"


async def test_a_call_that_reads_is_told_of_a_caller_that_leaves() -> None:
    async with serving("local") as (_, handlers, channel):
        call = channel.stream_stream("/a.B/Listen")()
        await call.write(b"x")
        await handlers.begun.wait()
        call.cancel()
        assert await asyncio.wait_for(handlers.ends.get(), 5.0) == "read the end"


async def test_calls_of_a_connection_that_is_gone_end() -> None:
    async with serving("local") as (server, handlers, channel):
        call = channel.unary_unary("/a.B/Wait")(b"")
        await handlers.begun.wait()
        assert isinstance(server, LocalServer)
        (peer,) = server.peers
        peer.close()
        assert await asyncio.wait_for(handlers.ends.get(), 5.0) == "cancelled"
        with pytest.raises(grpc.aio.AioRpcError):
            await call


async def test_a_stop_waits_for_calls_within_its_grace_and_takes_no_new_ones(kind: str) -> None:
    async with serving(kind) as (server, handlers, channel):
        call = channel.stream_stream("/a.B/Listen")()
        await call.write(b"x")
        await handlers.begun.wait()
        stopping = asyncio.create_task(server.stop(5.0))
        await asyncio.sleep(0.1)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary("/a.B/Head")(b"", timeout=0.5)
        assert refused.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        await call.done_writing()
        assert await asyncio.wait_for(handlers.ends.get(), 5.0) == "read the end"
        await stopping


async def test_a_stop_without_grace_ends_calls(kind: str) -> None:
    async with serving(kind) as (server, handlers, channel):
        call = channel.unary_unary("/a.B/Wait")(b"")
        await handlers.begun.wait()
        await server.stop(0)
        assert await asyncio.wait_for(handlers.ends.get(), 5.0) == "cancelled"
        with pytest.raises(grpc.aio.AioRpcError):
            await call


async def test_its_health_is_served(kind: str) -> None:
    async with serving(kind) as (_, _, channel):
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_peer_that_speaks_no_grpc_costs_its_own_connection_alone() -> None:
    async with serving("local") as (server, _, channel):
        assert isinstance(server, LocalServer)
        assert await channel.stream_unary("/a.B/Join")(iter((b"a",))) == b"a"
        port = int(server.addresses[0].rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await asyncio.wait_for(reader.read(), 5.0)
        writer.close()
        assert await channel.stream_unary("/a.B/Join")(iter((b"b",))) == b"b"


def test_only_addresses_of_this_machine_by_number_are_taken() -> None:
    assert [
        each
        for each in ("127.0.0.1:1", "[::1]:1", "localhost:1", "10.0.0.1:1", "unix:/x", "0.0.0.0:1", "tls://127.0.0.1:1")
        if takes(each)
    ] == [
        "127.0.0.1:1",
        "[::1]:1",
    ]
    with pytest.raises(ValueError, match="this machine"):
        LocalServer().add_insecure_port("0.0.0.0:0")


async def test_a_port_that_is_taken_is_an_error(kind: str) -> None:
    server = SERVERS[kind]()
    port = server.add_insecure_port("127.0.0.1:0")
    with pytest.raises(RuntimeError):
        SERVERS[kind]().add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.stop(0)
