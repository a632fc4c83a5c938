"""Bad input to a gRPC server of the mesh: it refuses, and answers the next good call."""

import asyncio
import gzip
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from weft.api.common.v1 import json_value_pb2
from weft.api.runner.v1 import generation_service_pb2
from weft.kernel.rpc import MAX_MESSAGE_BYTES, MAX_METADATA_BYTES, answering, open_channel
from weft_app.compose.grpc_host import GrpcHost

NAME = "weft.test.Echo"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SECONDS = 10.0


def unary(channel: grpc.aio.Channel, method: str) -> Any:
    """A method of bytes, which the stubs of grpcio do not offer."""
    return channel.unary_unary(method)


def streamed(channel: grpc.aio.Channel) -> Any:
    """The endless stream, as bytes."""
    return channel.unary_stream(f"/{NAME}/Endless")


@dataclass
class Echo:
    """A service of the test: one unary call, an endless stream, and a client stream."""

    service_names: Sequence[str] = (NAME,)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    began: asyncio.Event = field(default_factory=asyncio.Event)
    running: int = 0

    def register(self, server: grpc.aio.Server) -> None:
        kinds = {
            "Once": grpc.unary_unary_rpc_method_handler,
            "Endless": grpc.unary_stream_rpc_method_handler,
            "Collect": grpc.stream_unary_rpc_method_handler,
        }
        methods = {
            name: kind(
                getattr(self, name.lower()),
                request_deserializer=generation_service_pb2.GenerateRequest.FromString,
                response_serializer=generation_service_pb2.GenerateRequest.SerializeToString,
            )
            for name, kind in kinds.items()
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, methods),))

    async def start(self) -> None:
        """Does nothing."""

    async def stop(self, grace_seconds: float) -> None:
        """Does nothing."""

    async def once(self, request: Any, context: Any) -> Any:
        async with answering(context):
            return generation_service_pb2.GenerateRequest()

    async def endless(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.running += 1
        self.began.set()
        try:
            yield generation_service_pb2.GenerateRequest()
            await asyncio.Event().wait()
        finally:
            self.running -= 1
            self.ended.set()

    async def collect(self, requests: Any, context: Any) -> Any:
        try:
            async for _ in requests:
                pass
        finally:
            self.ended.set()
        return generation_service_pb2.GenerateRequest()


@dataclass
class Stage:
    address: str
    channel: grpc.aio.Channel
    echo: Echo

    async def once(self, raw: bytes = b"", **options: Any) -> bytes:
        """One call with these bytes as its message."""
        return bytes(await unary(self.channel, f"/{NAME}/Once")(raw, timeout=SECONDS, **options))

    async def refusal(self, raw: bytes = b"", **options: Any) -> grpc.StatusCode:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await self.once(raw, **options)
        details = refused.value.details() or ""
        assert "Traceback" not in details
        assert "/work/" not in details
        return refused.value.code()


@asynccontextmanager
async def stage(*, is_public: bool = False) -> AsyncIterator[Stage]:
    """A server of the mesh; at the end it must still answer a good call."""
    host, echo = GrpcHost(is_public=is_public), Echo()
    address = host.bind("127.0.0.1:0")
    await host.start([echo])
    try:
        async with open_channel(address) as channel:
            found = Stage(address, channel, echo)
            yield found
            assert await found.once() == b""
    finally:
        await host.stop(0.0)


def nested(depth: int) -> bytes:
    """A request with JSON of this many nested messages, built without protobuf."""
    inner = b""
    tags = (
        json_value_pb2.JsonValue.DESCRIPTOR.fields_by_name["array_value"].number,
        json_value_pb2.JsonArray.DESCRIPTOR.fields_by_name["values"].number,
    )
    for level in range(depth):
        inner = bytes([tags[level % 2] << 3 | 2]) + varint(len(inner)) + inner
    return inner


def varint(number: int) -> bytes:
    raw = b""
    while number > 0x7F:
        raw += bytes([number & 0x7F | 0x80])
        number >>= 7
    return raw + bytes([number])


@pytest.mark.slow("floods a service")
async def test_r1_a_message_beyond_the_limit_is_refused() -> None:
    async with (
        stage() as found,
        grpc.aio.insecure_channel(found.address, options=[("grpc.max_send_message_length", -1)]) as free,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await unary(free, f"/{NAME}/Once")(b"x" * (MAX_MESSAGE_BYTES + 1), timeout=SECONDS)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_r2_metadata_beyond_the_limit_is_refused() -> None:
    async with stage() as found:
        # Slightly above the limit gRPC refuses some messages; from a quarter above it, all.
        large = (("x-large", "x" * (MAX_METADATA_BYTES * 2)),)
        assert await found.refusal(metadata=large) is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    "raw",
    [
        PREFACE,
        PREFACE + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + b"\x00\xff\xff\x00\x00\x00\x00\x00\x01abc",
        PREFACE + b"\xff\xff\xff\x04\x00\x00\x00\x00\x00",
        PREFACE + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + b"\x00\x00\x05\x01\x00\x00\x00\x00\x01\xff\xff\xff\xff\xff",
        PREFACE + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + b"\x00\x00\x08\x06\x00\x00\x00\x00\x00pingpong" * 10_000,
        PREFACE + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" * 10_000,
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\x00" * 100_000,
    ],
    ids=["silence", "truncated", "huge frame", "wrong headers", "pings", "settings", "http/1.1", "tls", "zeros"],
)
async def test_r3_bytes_that_are_no_http2_or_too_much_of_it_harm_nobody(raw: bytes) -> None:
    async with stage() as found:
        host, _, port = found.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        with suppress(OSError):
            writer.write(raw)
            await writer.drain()
            writer.write_eof()
            await asyncio.wait({asyncio.ensure_future(reader.read())}, timeout=SECONDS)
        writer.close()


@pytest.mark.parametrize(
    "raw",
    [b"\xff", b"\x0a\xff", b"\x0a\x01\xff", b"\x07", b"\x0a" + b"\xff" * 9 + b"\x01"],
    ids=["tag", "length", "no UTF-8", "group", "2^63"],
)
async def test_r4_bytes_that_are_another_message_are_refused(raw: bytes) -> None:
    async with stage() as found:
        # gRPC reports UNKNOWN with asyncio, INTERNAL with threads.
        assert await found.refusal(raw) in {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL}


def test_r5_what_is_nested_too_deeply_is_no_message() -> None:
    json_value_pb2.JsonValue.FromString(nested(90))
    with pytest.raises(Exception, match=r"pars|nest|recurs") as refused:  # protobuf's runtimes have names of their own
        json_value_pb2.JsonValue.FromString(nested(101))
    assert type(refused.value).__name__ == "DecodeError"


async def test_r7_a_stream_that_is_never_finished_ends_with_its_deadline_or_its_caller() -> None:
    async with stage() as found:
        call: Any = found.channel.stream_unary(f"/{NAME}/Collect")(timeout=SECONDS)
        await call.write(b"")
        call.cancel()
        async with asyncio.timeout(SECONDS):
            await found.echo.ended.wait()


async def test_r8_many_streams_of_one_channel_are_served_and_all_end_with_it() -> None:
    async with stage() as found:
        async with open_channel(found.address) as channel:
            calls = [streamed(channel)(b"", timeout=SECONDS * 6) for _ in range(500)]
            await asyncio.gather(*(call.read() for call in calls))
            assert found.echo.running == 500
        async with asyncio.timeout(SECONDS):
            while found.echo.running:
                found.echo.ended.clear()
                await found.echo.ended.wait()


@pytest.mark.parametrize("reads", [0, 1])
async def test_r10_a_call_that_is_cancelled_ends_at_the_server(reads: int) -> None:
    async with stage() as found:
        call = streamed(found.channel)(b"", timeout=SECONDS)
        await call.wait_for_connection()
        for _ in range(reads):
            await call.read()
        async with asyncio.timeout(SECONDS):
            await found.echo.began.wait()
            call.cancel()
            await found.echo.ended.wait()


@pytest.mark.parametrize(
    "method", [f"/{NAME}/Nothing", "/weft.test.Nothing/Once", "/", "//", "/a/b/c", "/" + "x" * 5000]
)
async def test_r11_a_method_that_nobody_has_is_unimplemented(method: str) -> None:
    async with stage() as found:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await unary(found.channel, method)(b"", timeout=SECONDS)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_r12_strangers_learn_of_health_alone() -> None:
    async with stage(is_public=True) as found:
        health = health_pb2_grpc.HealthStub(found.channel)
        assert (await health.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)).status == 1
        asked = reflection_pb2_grpc.ServerReflectionStub(found.channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=SECONDS
        )
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await asked.read()
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.slow("floods a service")
async def test_r13_a_small_message_that_unfolds_beyond_the_limit_is_refused() -> None:
    raw = b"x" * (MAX_MESSAGE_BYTES + 1)
    assert len(gzip.compress(raw)) < MAX_MESSAGE_BYTES // 500
    options = [("grpc.max_send_message_length", -1)]
    async with (
        stage() as found,
        grpc.aio.insecure_channel(found.address, options=options, compression=grpc.Compression.Gzip) as free,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await unary(free, f"/{NAME}/Once")(raw, timeout=SECONDS)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
