"""A gRPC server with TLS that answers, and callers of it."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from weft.kernel.channels.rpc import error_from_call, open_channel
from weft.kernel.channels.tls import ServerTls, TlsFiles
from weft.kernel.channels.tls_channel import ChannelSecurity
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.compose.grpc_host import GrpcHost

ECHO = "/weft.test.Echo/Say"
COUNT = "/weft.test.Echo/Count"
SECONDS = 10.0


class Echo:
    """As a service: `Say` answers what it is told and with which key; `Count` tells on when it is told to."""

    service_names = ("weft.test.Echo",)

    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    def register(self, server: grpc.aio.Server) -> None:
        handlers: dict[str, Any] = {
            "Say": grpc.unary_unary_rpc_method_handler(self._say),
            "Count": grpc.unary_stream_rpc_method_handler(self._count),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("weft.test.Echo", handlers),))

    async def start(self) -> None:
        pass

    async def stop(self, grace_seconds: float) -> None:
        pass

    async def _say(self, request: bytes, context: Any) -> bytes:
        key = dict(context.invocation_metadata()).get("authorization", "")
        return request + str(key).encode()

    async def _count(self, request: bytes, context: Any) -> AsyncGenerator[bytes]:
        yield b"1"
        await self.go_on.wait()
        yield b"2"


@asynccontextmanager
async def serving(tls: ServerTls | None, address: str = "tls:127.0.0.1:0") -> AsyncIterator[tuple[str, Echo]]:
    host, echo = GrpcHost(tls=tls), Echo()
    bound = host.bind(address)
    await host.start([echo])
    try:
        yield bound, echo
    finally:
        echo.go_on.set()
        await host.stop(0.0)


async def say(channel: grpc.aio.Channel, words: bytes = b"hello") -> bytes:
    """What the server answers. Raises what the call failed with, as the mesh's code sees it."""
    method: Any = channel.unary_unary(ECHO)
    try:
        answer: bytes = await method(words, timeout=SECONDS)
    except grpc.aio.AioRpcError as error:
        raise error_from_call(error, Reason.SERVICE_UNAVAILABLE) from error
    return answer


def count(channel: grpc.aio.Channel) -> Any:
    """A stream that goes on when the server is told so."""
    method: Any = channel.unary_stream(COUNT)
    return method(b"", timeout=SECONDS)


async def say_to(address: str, files: TlsFiles | None = None, words: bytes = b"hello") -> bytes:
    """One call on a channel of its own."""
    async with open_channel(address, ChannelSecurity(files=files or TlsFiles())) as channel:
        return await say(channel, words)


async def refusal_of(address: str, files: TlsFiles | None = None) -> str:
    """The words of a call that must fail because there is no connection."""
    with pytest.raises(WeftError) as refused:
        await say_to(address, files)
    assert refused.value.reason is Reason.SERVICE_UNAVAILABLE
    return refused.value.message
