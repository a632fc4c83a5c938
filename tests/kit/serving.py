"""A gRPC service at a socket."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from weft.kernel.channels.rpc import new_server, open_channel


@asynccontextmanager
async def served(
    socket: Path, *services: tuple[Callable[[Any, grpc.aio.Server], object], object]
) -> AsyncIterator[Any]:
    """Yields a channel to servicers, each given after the function that adds it to a server."""
    server = new_server()
    for add, servicer in services:
        add(servicer, server)
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    channel = open_channel(f"unix:{socket}")
    try:
        yield channel
    finally:
        await channel.close(grace=None)
        await server.stop(grace=None)
