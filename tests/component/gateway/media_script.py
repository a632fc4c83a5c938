"""A scripted host on the internet: its addresses, its certificate, and every byte it sends."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import trustme

from gateway.media.fetcher import Network
from weft.kernel.channels.outbound import AddressInfo

HOST = "images.example.org"
PUBLIC = "93.184.216.34"
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def response(
    body: bytes, *, status: str = "200 OK", headers: Mapping[str, str] | None = None, length: int | None = None
) -> bytes:
    """A response; `length` replaces the true Content-Length, a negative one omits it."""
    told = len(body) if length is None else length
    lines = [f"HTTP/1.1 {status}", "Content-Type: image/png", *(f"{k}: {v}" for k, v in (headers or {}).items())]
    if headers and "Content-Type" in headers:
        lines.remove("Content-Type: image/png")
    if told >= 0:
        lines.append(f"Content-Length: {told}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def sending(raw: bytes) -> Answer:
    """Sends these bytes and closes."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)
        await writer.drain()

    return answer


@dataclass
class Resolver:
    """Resolves every name to the next list of addresses; the last one repeats."""

    answers: list[list[str]] = field(default_factory=lambda: [[PUBLIC]])
    asked: list[str] = field(default_factory=list)

    async def look_up(self, host: str, port: int) -> list[AddressInfo]:
        self.asked.append(host)
        found = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return [
            (socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
            for address in found
        ]


class _RedirectedSocket(socket.socket):
    """Connects to the test's own server instead of the given address."""

    port = 0

    def connect(self, address: object) -> None:
        super().connect(("127.0.0.1", self.port))


@dataclass
class HostileHost:
    """The network of a fetch. Records the requests that reach it."""

    port: int
    network: Network
    resolver: Resolver
    answer: Answer
    requests: list[bytes] = field(default_factory=list)
    connected_to: list[str] = field(default_factory=list)
    """The addresses of opened sockets."""
    was_asked: asyncio.Event = field(default_factory=asyncio.Event)
    was_left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the peer has closed."""

    connections: dict[asyncio.Task[None], asyncio.StreamWriter] = field(default_factory=dict)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.connections[task] = writer
        with suppress(ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            self.requests.append(await reader.readuntil(b"\r\n\r\n"))
            self.was_asked.set()
            await self.answer(reader, writer)
        writer.close()
        with suppress(ConnectionError, ssl.SSLError, TimeoutError):
            await writer.wait_closed()
        self.was_left.set()


@asynccontextmanager
async def hostile_host(
    answer: Answer,
    *,
    addresses: list[list[str]] | None = None,
    certified_for: str = HOST,
    trusted: bool = True,
    tls: bool = True,
) -> AsyncIterator[HostileHost]:
    """A server on loopback that a fetcher reaches under a public address."""
    authority = trustme.CA()
    theirs, ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert(certified_for).configure_cert(theirs)
    if trusted:
        authority.configure_trust(ours)
    resolver = Resolver(addresses or [[PUBLIC]])
    server = await asyncio.start_server(
        lambda *streams: host.serve(*streams),  # noqa: PLW0108 - made below
        "127.0.0.1",
        0,
        ssl=theirs if tls else None,
    )
    port = server.sockets[0].getsockname()[1]

    def open_socket(info: AddressInfo) -> socket.socket:
        host.connected_to.append(info[4][0])
        opened = _RedirectedSocket(socket.AF_INET, socket.SOCK_STREAM)
        opened.port = port
        return opened

    network = Network(look_up=resolver.look_up, open_socket=open_socket, tls=ours)
    host = HostileHost(port, network, resolver, answer)
    try:
        yield host
    finally:
        server.close()
        for writer in host.connections.values():
            writer.transport.abort()
        if host.connections:
            await asyncio.wait(host.connections)
