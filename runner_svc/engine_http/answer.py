"""An HTTP response: its head, and its body as it arrives, within limits."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import httptools

from runner_svc.engine_http.faults import BadHeadError, BrokenAnswerError, HttpFaultError, UnansweredError
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.text.content_coding import CODINGS, BodyDecoder

MAX_HEAD_BYTES = 64 * 1024
"""Maximum size of the heads of a response, including informational ones, and of its trailers."""
MAX_HEADER_BYTES = 8190
"""Maximum size of a header's name and value together, as in most servers."""
MAX_HEADERS = 128
"""Maximum number of headers and trailers of a response."""
MAX_BUFFERED_BYTES = 256 * 1024
"""Maximum size of the unread body before the client pauses reading, which slows down the server. One more read of the
event loop may exceed it."""
_INTERIM = range(100, 200)
_SWITCHING = 101
_BODYLESS = frozenset({_SWITCHING, 204, 304})
_VERSIONS = frozenset({"1.0", "1.1"})


class Answer:
    """A response. The parser calls the `on_...` methods."""

    __slots__ = (
        *(
            "_began",
            "_buffered",
            "_decoder",
            "_fault",
            "_has_head",
            "_head_bytes",
            "_header_count",
            "_headers",
            "_is_interim",
        ),
        *("_lasts_to_end", "_on_release", "_on_room", "_parser", "_parts", "_waiter"),
        *("coding", "is_complete", "is_followed", "keeps_connection", "status"),
    )

    def __init__(self, on_room: Callable[[], None], on_release: "Callable[[Answer], None]") -> None:
        """`on_room` is called when all received data was read, `on_release` when the response is no longer needed."""
        self.status = 0
        self.coding = ""
        """Content coding of the body; empty: none. Those in CODINGS are decoded."""
        self.is_complete = False
        """Whether the complete body has arrived."""
        self.is_followed = False
        """Whether bytes followed the response: the next request would read them as its response."""
        self.keeps_connection = False
        self._on_room, self._on_release = on_room, on_release
        self._headers: dict[bytes, bytes] = {}
        self._parts: list[bytes] = []
        self._decoder: BodyDecoder | None = None
        self._buffered = 0
        self._fault: HttpFaultError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._began = self._has_head = self._is_interim = self._lasts_to_end = False
        self._head_bytes = self._header_count = 0
        parser = httptools.HttpResponseParser(self)
        # Common deviations that are unambiguous.
        parser.set_dangerous_leniencies(
            lenient_headers=True, lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True
        )
        self._parser: httptools.HttpResponseParser | None = parser

    def header(self, name: str) -> str:
        """Returns the first header with a lower-case name; empty: there is none."""
        return _text(self._headers.get(name.encode(), b""))

    @property
    def headers(self) -> dict[str, str]:
        """The headers by lower-case name; of duplicates the first."""
        return {name.decode("latin-1"): _text(value) for name, value in self._headers.items()}

    @property
    def content_type(self) -> str:
        """Media type in lower case, without parameters."""
        return self.header("content-type").partition(";")[0].strip().lower() or "application/octet-stream"

    async def head(self) -> None:
        """Waits until the head is complete. Raises HttpFaultError."""
        while not self._has_head:
            if self._fault is not None:
                raise self._fault
            await self._arrival()

    def read(self) -> Coroutine[Any, Any, bytes]:
        """Returns the received part of the body, or waits for one; empty at the end. Raises HttpFaultError.

        Decodes the codings in CODINGS even though requests ask for none.
        """
        return self._received() if self._decoder is None else self._decoded(self._decoder)

    async def _decoded(self, decoder: BodyDecoder) -> bytes:
        try:
            while True:
                data = b"" if decoder.has_more else await self._received()
                if not data and not decoder.has_more:
                    decoder.require_end()
                    return b""
                if decoded := decoder.decode(data, MAX_BUFFERED_BYTES):
                    return decoded
        except WeftError as error:
            self.fail(BrokenAnswerError())
            raise BrokenAnswerError from error

    async def _received(self) -> bytes:
        while not self._parts:
            if self._fault is not None:
                raise self._fault
            if self.is_complete:
                return b""
            await self._arrival()
        parts = self._parts
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        if self._buffered > MAX_BUFFERED_BYTES:
            self._on_room()
        self._buffered = 0
        return data

    async def parts(self) -> AsyncIterator[bytes]:
        """Yields the parts of the body as they arrive. Raises HttpFaultError."""
        while part := await self.read():
            yield part

    def release(self) -> None:
        """Makes the connection available if the response is complete; otherwise closes it, which cancels the request.

        Idempotent.
        """
        self._on_release(self)

    def feed(self, data: bytes) -> bool:
        """Processes received bytes; returns whether the unread body exceeds its limit."""
        if self._parser is None:
            self.is_followed = True
            return False
        self._began = True
        buffered = self._buffered
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._end()
        except httptools.HttpParserError:
            self.fail(BrokenAnswerError() if self._has_head else BadHeadError())
        if self._buffered == buffered and self._parser is not None:
            self._bound(len(data))
        self._wake()
        return self._buffered > MAX_BUFFERED_BYTES

    def fail(self, fault: HttpFaultError) -> None:
        """Ends the response with a fault and drops unread data. The first fault is kept."""
        self._fault = self._fault or fault
        self._parts.clear()
        self.is_complete = self.keeps_connection = False
        self._parser = None
        self._wake()

    def lose(self, error: Exception | None) -> None:
        """Handles the end of the connection; `error` is None for a regular one. Received data can still be read."""
        if self.is_complete or self._fault is not None:
            return
        if self._lasts_to_end and error is None:
            self.is_complete = True
        elif self._has_head:
            self._fault = BrokenAnswerError()
        else:
            self._fault = BadHeadError() if self._began else UnansweredError()
        self._parser = None
        self._wake()

    def on_message_begin(self) -> None:
        """A response starts, informational or final; after the final one it is unsolicited."""
        self.is_followed = self.is_complete

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header or a trailer is complete."""
        self._header_count += 1
        if self._header_count > MAX_HEADERS or len(name) + len(value) > MAX_HEADER_BYTES:
            self._exceed()
        elif not self._has_head:
            self._headers.setdefault(name.lower(), value)

    def on_headers_complete(self) -> None:
        """A head is complete."""
        parser = self._parser
        if parser is None or self.is_complete:
            return
        status = parser.get_status_code()
        if parser.get_http_version() not in _VERSIONS:
            self.fail(BadHeadError())
            return
        self._is_interim = status in _INTERIM and status != _SWITCHING
        if self._is_interim:
            self._headers.clear()
            return
        self.status, self._has_head = status, True
        if b"content-encoding" in self._headers:
            codings = [coding.strip() for coding in self.header("content-encoding").lower().split(",")]
            self.coding = ", ".join(coding for coding in codings if coding not in ("", "identity"))
            self._decoder = BodyDecoder(self.coding) if self.coding in CODINGS else None
        coding = self._headers.get(b"transfer-encoding")
        is_framed = b"content-length" in self._headers if coding is None else coding.lower().endswith(b"chunked")
        self._lasts_to_end = not is_framed and status not in _BODYLESS

    def on_body(self, data: bytes) -> None:
        """A part of the body has arrived."""
        if not self.is_complete and self._parser is not None:
            self._parts.append(data)
            self._buffered += len(data)
            self._head_bytes = 0

    def on_message_complete(self) -> None:
        """A response is complete, informational or final."""
        if not self._is_interim and not self.is_complete:
            self._end()

    def _end(self) -> None:
        parser, self._parser = self._parser, None
        if parser is not None:
            self.is_complete = self._has_head
            self.keeps_connection = self.status != _SWITCHING and parser.should_keep_alive()

    def _bound(self, received: int) -> None:
        """Counts bytes outside the body: heads, trailers, framing."""
        self._head_bytes += received
        if self._head_bytes > MAX_HEAD_BYTES and not self.is_complete:
            self._exceed()

    def _exceed(self) -> None:
        self.fail(BrokenAnswerError() if self._has_head else BadHeadError(is_long=True))

    def _arrival(self) -> asyncio.Future[None]:
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _text(value: bytes) -> str:
    return value.decode("utf-8", "surrogateescape")
