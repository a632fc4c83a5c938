"""A gRPC server for one test."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc

from weft.kernel.access.principal import KeyRing
from weft.kernel.access.rpc_auth import AuthInterceptor
from weft.kernel.channels.rpc import new_server, open_channel
from weft_testing.fake_clock import FakeClock


@asynccontextmanager
async def served(
    *services: Callable[[grpc.aio.Server], object], address: str = "127.0.0.1:0", keys: KeyRing | None = None
) -> AsyncIterator[grpc.aio.Channel]:
    """Yields a channel to a server to which `services` add themselves; with `keys` it requires one of them."""
    server = new_server(() if keys is None else (AuthInterceptor(lambda: keys, FakeClock()),))
    for add in services:
        add(server)
    port = server.add_insecure_port(address)
    await server.start()
    try:
        async with open_channel(address.replace(":0", f":{port}")) as channel:
            yield channel
    finally:
        await server.stop(grace=None)
