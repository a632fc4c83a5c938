"""An in-process server that answers each request with the bytes of a test."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import msgspec

MODELS = "/v1/models"
FACTS = ("/props", "/metrics", "/api/show")
"""Routes with which a runner reads facts from an attached server."""
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


@dataclass
class Connection:
    """One client connection, with means to misbehave."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    number: int
    """Counted from 0."""
    requests: int = 0

    async def send(self, data: bytes) -> None:
        """Writes raw bytes."""
        self.writer.write(data)
        with suppress(ConnectionError):
            await self.writer.drain()

    def reset(self) -> None:
        """Closes the connection with a TCP reset."""
        self.writer.transport.abort()

    async def close(self) -> None:
        """Closes the connection regularly."""
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()


@dataclass(frozen=True)
class Request:
    """A received request."""

    method: str
    path: str
    body: bytes

    @property
    def words(self) -> str:
        """Returns the text of a chat's last message, or a completion's prompt."""
        document = msgspec.json.decode(self.body) if self.body.startswith(b"{") else {}
        if "messages" in document:
            content = document["messages"][-1]["content"]
            return content if isinstance(content, str) else content[0]["text"]
        return str(document.get("prompt") or document.get("input") or "")


Handler = Callable[[Connection, Request], Awaitable[None]]


@dataclass
class HostileServer:
    """A listening server. Its list of models is always valid, so that it counts as available; it reports no facts."""

    handler: Handler
    url: str = ""
    opened: int = 0
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with the first request."""
    requests: list[Request] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers requests of one connection until either side closes it."""
        connection = Connection(reader, writer, self.opened)
        self.opened += 1
        self.connections.append(connection)
        task = asyncio.current_task()
        assert task is not None
        self.tasks.append(task)
        # asyncio logs a traceback for a server's cancelled task; the test has ended by then.
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while not writer.is_closing():
                request = await _read(reader)
                if request.path in (MODELS, "/health"):
                    await connection.send(answer(b'{"data":[]}'))
                    continue
                if request.path in FACTS:
                    await connection.send(answer(b"", status="404 Not Found"))
                    continue
                self.requests.append(request)
                self.asked.set()
                connection.requests += 1
                await self.handler(connection, request)
        writer.close()


async def _read(reader: asyncio.StreamReader) -> Request:
    head = await reader.readuntil(b"\r\n\r\n")
    method, path, _ = head.split(b" ", 2)
    length = _LENGTH.search(head)
    body = await reader.readexactly(int(length[1])) if length else b""
    return Request(method.decode(), path.decode(), body)


@asynccontextmanager
async def hostile_server(handler: Handler) -> AsyncIterator[HostileServer]:
    """Yields a server on a free port."""
    hostile = HostileServer(handler)
    server = await asyncio.start_server(hostile.serve, "127.0.0.1", 0, limit=1 << 22)
    hostile.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield hostile
    finally:
        server.close()
        for connection in hostile.connections:
            connection.writer.transport.abort()
        for task in hostile.tasks:
            task.cancel()
        await asyncio.gather(*hostile.tasks, return_exceptions=True)


def answer(body: bytes, media_type: str = "application/json", status: str = "200 OK", extra: str = "") -> bytes:
    """Returns a valid answer with Content-Length."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: {media_type}\r\nContent-Length: {len(body)}\r\n{extra}\r\n"
    return head.encode() + body


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


def chunked(body: bytes) -> bytes:
    """Returns a chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(body), body) if body else b""


def event(document: object) -> bytes:
    """Returns a server-sent event with a JSON document."""
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


def piece(text: str, **choice: object) -> bytes:
    """Returns a text chunk of a chat."""
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None, **choice}]})


def end(word: object = "stop") -> bytes:
    """Returns the end of choice 0."""
    return event({"choices": [{"index": 0, "delta": {}, "finish_reason": word}]})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
DONE = b"data: [DONE]\n\n"


def tidy(text: str) -> bytes:
    """Returns a complete valid stream, including its head."""
    return STREAM_HEAD + chunked(piece(text) + end() + USAGE + DONE) + LAST_CHUNK
