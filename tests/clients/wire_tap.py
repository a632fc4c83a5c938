"""A wire between a client and the gateway that passes bytes on as they are, and remembers them."""

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

MAX_REMEMBERED_BYTES = 4 * 1024 * 1024
"""Of each direction of a connection."""
_READ_BYTES = 65_536
_HEAD = re.compile(rb"(GET|HEAD|POST|PUT|PATCH|DELETE|OPTIONS) (/\S*) HTTP/1\.1\r\n((?:[^\r\n]+\r\n)*)\r\n")
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) [^\r\n]*\r\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request."""

    method: str
    path: str
    """Without the query."""
    query: str
    headers: dict[str, str]
    """By lower-case name."""
    body: str
    status: int
    """Of its answer; 0: there was none."""

    @property
    def key(self) -> str:
        """What it carried as its key; empty: none."""
        return self.headers.get("x-api-key", "") or self.headers.get("authorization", "").removeprefix("Bearer ")

    @property
    def key_kind(self) -> str:
        """How it carried its key."""
        kinds = {"authorization": "Bearer", "x-api-key": "x-api-key"}
        return " and ".join(kind for header, kind in kinds.items() if header in self.headers) or "none"


@dataclass(slots=True)
class _Connection:
    sent: bytearray = field(default_factory=bytearray)
    answered: bytearray = field(default_factory=bytearray)


class WireTap:
    """What went over the wire so far."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.connections: list[_Connection] = []

    @property
    def asked(self) -> list[Asked]:
        """Every request, by connection."""
        return [request for connection in self.connections for request in _requests(connection)]

    def transcript(self, last_bytes: int = 3000) -> str:
        """The end of the last connections, for people."""
        parts = []
        for connection in self.connections[-3:]:
            for title, data in (("client", connection.sent), ("weft", connection.answered)):
                parts.append(f"--- {title} ---\n{bytes(data[-last_bytes:]).decode(errors='replace')}")
        return "\n".join(parts)


@asynccontextmanager
async def wire_tap(url: str) -> AsyncGenerator[WireTap]:
    """A port of 127.0.0.1 behind which is `url`, until the end of the block."""
    where = urlsplit(url)
    wires: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection()
        tap.connections.append(connection)
        wire = asyncio.create_task(_pass_on(reader, writer, (where.hostname, where.port), connection))
        wires[wire] = writer
        wire.add_done_callback(wires.pop)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    tap = WireTap(server.sockets[0].getsockname()[1])
    try:
        yield tap
    finally:
        server.close()
        # A wire whose client is gone comes to its end by itself, and closes what it opened.
        for writer in wires.values():
            writer.transport.abort()
        await asyncio.gather(*wires, return_exceptions=True)


async def _pass_on(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    target: tuple[str | None, int | None],
    connection: _Connection,
) -> None:
    ends = [writer]
    ways: list[asyncio.Task[None]] = []
    try:
        upstream_reader, upstream_writer = await asyncio.open_connection(*target)
        ends.append(upstream_writer)
        ways.append(asyncio.create_task(_copy(reader, upstream_writer, connection.sent)))
        ways.append(asyncio.create_task(_copy(upstream_reader, writer, connection.answered)))
        # Either side's end is the end of both: nobody here half-closes.
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    except ConnectionError:
        # A gateway that is not there is, to the client, one that hangs up.
        connection.answered += b"(nobody listens)"
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        for end in ends:
            end.close()
            with suppress(OSError):
                await end.wait_closed()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, memory: bytearray) -> None:
    try:
        while data := await reader.read(_READ_BYTES):
            memory += data[: MAX_REMEMBERED_BYTES - len(memory)]
            writer.write(data)
            await writer.drain()
    except ConnectionResetError:
        # A broken answer stays a broken one on the other side.
        writer.transport.abort()


def _requests(connection: _Connection) -> list[Asked]:
    sent = bytes(connection.sent)
    heads = list(_HEAD.finditer(sent))
    ends = [head.start() for head in heads[1:]] + [len(sent)]
    statuses = [int(code) for code in _STATUS.findall(bytes(connection.answered))]
    # The last requests may have got no answer.
    statuses += [0] * len(heads)
    return [
        Asked(
            method=head[1].decode(),
            path=head[2].decode().partition("?")[0],
            query=head[2].decode().partition("?")[2],
            headers=_headers(head[3]),
            body=sent[head.end() : end].decode(errors="replace"),
            status=status,
        )
        for head, end, status in zip(heads, ends, statuses, strict=False)
    ]


def _headers(head: bytes) -> dict[str, str]:
    pairs = [line.partition(b":") for line in head.splitlines()]
    return {name.decode().lower(): value.strip().decode() for name, _, value in pairs}
