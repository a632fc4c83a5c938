"""A fake model provider that counts every byte it receives, and answers with scripted replies.

async with counting_provider() as provider:
    ... provider.base_url ...
    provider.replies.append(Reply(status=429, headers={"Retry-After": "17"}))
    assert provider.byte_count == 0
"""

import asyncio
import json
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

MAX_HEAD_BYTES = 64 * 1024
WORDS = ("one", " two", " three")
USAGE = {"prompt_tokens": 11, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The scripted reply to one request."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    """None: a streamed answer of WORDS for status 200, else an error without a message."""
    drops: bool = False
    """Close the connection without an answer."""
    breaks_after_words: bool = False
    """Close the connection after the words, before the end of the answer."""
    silent: bool = False
    """Never answer, and keep the connection open."""
    meanwhile: Callable[[], object] | None = None
    """Called between the request and the reply."""


@dataclass(frozen=True, slots=True)
class ProviderRequest:
    """A received request."""

    method: str
    path: str
    headers: Mapping[str, str]
    """Headers by lower-case name."""
    body: Any
    """The JSON body; None: none."""


class CountingProvider:
    """The provider, on one listening socket."""

    def __init__(self, *, over_tls: bool) -> None:
        self.byte_count = 0
        """Received bytes, without those of TLS."""
        self.connection_count = 0
        self.requests: list[ProviderRequest] = []
        self.replies: deque[Reply] = deque()
        """Replies to the next requests, in order; later requests are answered with WORDS."""
        self.list_status = 200
        """Status of the answer to GET /models."""
        self.port = 0
        """The port, while it listens."""
        self._scheme = "https" if over_tls else "http"
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._changed = asyncio.Event()
        self._ending = asyncio.Event()
        self._server: asyncio.Server | None = None

    @property
    def base_url(self) -> str:
        """The base URL, with the version."""
        return f"{self._scheme}://127.0.0.1:{self.port}/v7"

    @property
    def bodies(self) -> list[Any]:
        """Bodies of the received chats."""
        return [request.body for request in self.requests if request.path.endswith("/chat/completions")]

    async def until_asked(self, count: int) -> None:
        """Waits until `count` requests have arrived."""
        while len(self.requests) < count:
            self._changed.clear()
            await self._changed.wait()

    async def listen(self, context: ssl.SSLContext | None, port: int) -> None:
        """Starts to listen."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, ssl=context, limit=MAX_HEAD_BYTES)
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stops, and closes every connection."""
        assert self._server is not None
        self._server.close()
        self._ending.set()
        for writer in self._connections.values():
            writer.close()
        await asyncio.gather(*self._connections)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connection_count += 1
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while await self._answer(await self._request(reader), writer):
                    await writer.drain()
        finally:
            del self._connections[task]
            writer.close()

    async def _request(self, reader: asyncio.StreamReader) -> ProviderRequest:
        begin = await reader.readexactly(1)
        self.byte_count += 1
        if not begin.isalpha():
            raise ConnectionError("this is no HTTP, but TLS perhaps")
        rest = await reader.readuntil(b"\r\n\r\n")
        self.byte_count += len(rest)
        head = begin + rest
        first, *lines = head.decode().strip().split("\r\n")
        method, path, _ = first.split(" ", 2)
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        self.byte_count += len(body)
        request = ProviderRequest(method, path, headers, json.loads(body) if body else None)
        self.requests.append(request)
        self._changed.set()
        return request

    async def _answer(self, request: ProviderRequest, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection can be used again."""
        if request.method == "GET":
            writer.write(_whole(self.list_status, {}, b'{"data": []}'))
            return True
        reply = self.replies.popleft() if self.replies else Reply()
        if reply.meanwhile is not None:
            reply.meanwhile()
        if reply.silent:
            await self._ending.wait()
            return False
        if reply.drops:
            return False
        if reply.status == 200 and reply.body is None:
            writer.write(_stream(broken=reply.breaks_after_words))
            await writer.drain()
            return not reply.breaks_after_words
        writer.write(_whole(reply.status, reply.headers, reply.body or b'{"error": {}}'))
        return True


@asynccontextmanager
async def counting_provider(context: ssl.SSLContext | None = None, *, port: int = 0) -> AsyncIterator[CountingProvider]:
    """Yields a listening provider, over TLS if `context` is given; `port` 0: any free one."""
    provider = CountingProvider(over_tls=context is not None)
    await provider.listen(context, port)
    try:
        yield provider
    finally:
        await provider.close()


def _whole(status: int, headers: Mapping[str, str], body: bytes) -> bytes:
    lines = [
        f"HTTP/1.1 {status} As-Told",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def _stream(*, broken: bool) -> bytes:
    chunks: list[Any] = [{"choices": [{"index": 0, "delta": {"content": word}}]} for word in WORDS]
    if not broken:
        chunks += [{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}, {"choices": [], "usage": USAGE}]
    payloads = [json.dumps(chunk) for chunk in chunks] + ([] if broken else ["[DONE]"])
    body = "".join(f"data: {payload}\n\n" for payload in payloads).encode()
    length = len(body) + (1 if broken else 0)
    return f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: {length}\r\n\r\n".encode() + body
