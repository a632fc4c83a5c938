"""Bad input to a gRPC server of the mesh: it refuses, and answers the next good call."""

import asyncio
import gzip
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from weft.api.runner.v1 import generation_service_pb2
from weft.kernel.channels.rpc import MAX_MESSAGE_BYTES, MAX_METADATA_BYTES, answering, open_channel
from weft_app.compose.grpc_host import GrpcHost

NAME = "weft.test.Echo"
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


@pytest.mark.slow("floods a service")
async def test_r1_message_over_the_limit_is_rejected() -> None:
    async with (
        stage() as found,
        grpc.aio.insecure_channel(found.address, options=[("grpc.max_send_message_length", -1)]) as free,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await unary(free, f"/{NAME}/Once")(b"x" * (MAX_MESSAGE_BYTES + 1), timeout=SECONDS)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_r2_metadata_over_the_limit_is_rejected() -> None:
    async with stage() as found:
        # Slightly above the limit gRPC refuses some messages; from a quarter above it, all.
        large = (("x-large", "x" * (MAX_METADATA_BYTES * 2)),)
        assert await found.refusal(metadata=large) is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_r7_unfinished_stream_ends_with_its_deadline_or_its_caller() -> None:
    async with stage() as found:
        call: Any = found.channel.stream_unary(f"/{NAME}/Collect")(timeout=SECONDS)
        await call.write(b"")
        call.cancel()
        async with asyncio.timeout(SECONDS):
            await found.echo.ended.wait()


@pytest.mark.parametrize("reads", [0, 1])
async def test_r10_cancelled_call_ends_on_the_server(reads: int) -> None:
    async with stage() as found:
        call = streamed(found.channel)(b"", timeout=SECONDS)
        await call.wait_for_connection()
        for _ in range(reads):
            await call.read()
        async with asyncio.timeout(SECONDS):
            await found.echo.began.wait()
            call.cancel()
            await found.echo.ended.wait()


async def test_r12_unauthenticated_callers_can_only_check_health() -> None:
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
async def test_r13_small_message_that_decompresses_beyond_the_limit_is_rejected() -> None:
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
