"""A port of a namespace on a Unix socket: `port_on_socket.py SOCKET PORT`, which says when it is there."""

import asyncio
import sys
from contextlib import suppress

CHUNK_BYTES = 65_536


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
        writer.close()


async def _serve(path: str, port: int) -> None:
    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(_copy(reader, back), _copy(there, writer))

    server = await asyncio.start_unix_server(forward, path)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2])))
