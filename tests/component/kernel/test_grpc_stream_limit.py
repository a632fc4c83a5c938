"""A gRPC server limits its connections, and the open calls of one, and tells its clients of the latter."""

import asyncio
import struct
from contextlib import suppress

import pytest

from weft.kernel.channels import rpc
from weft.kernel.channels.rpc import MAX_STREAMS_PER_CONNECTION, new_server

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = 4
EMPTY_SETTINGS = bytes([0, 0, 0, SETTINGS, 0, 0, 0, 0, 0])
MAX_CONCURRENT_STREAMS = 3


async def test_server_announces_how_many_calls_of_a_connection_may_be_open() -> None:
    server = new_server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    reader, writer = await _connect(port)
    head = await reader.readexactly(9)
    assert head[3] == SETTINGS, "the first frame of a server"
    settings = await reader.readexactly(int.from_bytes(head[:3], "big"))
    writer.transport.abort()
    await server.stop(None)
    assert dict(struct.iter_unpack(">HI", settings))[MAX_CONCURRENT_STREAMS] == MAX_STREAMS_PER_CONNECTION


async def test_listener_closes_connections_beyond_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit, they use up the open files of the process."""
    monkeypatch.setattr(rpc, "max_connections", lambda: 1)
    server = new_server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    reader, first = await _connect(port)
    await reader.readexactly(9)
    beyond, second = await _connect(port)
    with suppress(ConnectionResetError):
        assert await beyond.read(1) == b""
    for writer in (first, second):
        writer.transport.abort()
    await server.stop(None)


async def _connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(PREFACE + EMPTY_SETTINGS)
    return reader, writer
