"""A gRPC server limits the open calls of one connection, and tells its clients."""

import asyncio
import struct

from weft.kernel.rpc import MAX_STREAMS_PER_CONNECTION, new_server

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = 4
EMPTY_SETTINGS = bytes([0, 0, 0, SETTINGS, 0, 0, 0, 0, 0])
MAX_CONCURRENT_STREAMS = 3


async def test_server_announces_how_many_calls_of_a_connection_may_be_open() -> None:
    server = new_server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(PREFACE + EMPTY_SETTINGS)
    head = await reader.readexactly(9)
    assert head[3] == SETTINGS, "the first frame of a server"
    settings = await reader.readexactly(int.from_bytes(head[:3], "big"))
    writer.transport.abort()
    await server.stop(None)
    assert dict(struct.iter_unpack(">HI", settings))[MAX_CONCURRENT_STREAMS] == MAX_STREAMS_PER_CONNECTION
