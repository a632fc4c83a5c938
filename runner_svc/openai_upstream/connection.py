"""Connections to one HTTP server, and the reading of its responses within bounds.

A connection is used again only if the server was silent between two answers: aiohttp keeps what arrives on an idle
connection and hands it to the next request as its answer. A server that sends a second answer (a desynchronised proxy,
or a malicious one) would so answer another caller. Bytes that cross the next request on the wire cannot be
distinguished from an answer to it: HTTP/1.1 has no identifier for that.
"""

import errno
import os
import select
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import aiohttp
from aiohttp.client_proto import ResponseHandler

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.time_limit import within

if TYPE_CHECKING:
    import asyncio

    from aiohttp.client_reqrep import ClientRequest, ConnectionKey
    from aiohttp.connector import Connection
    from aiohttp.tracing import Trace

DRAIN_SECONDS = 1.0
MAX_DRAIN_BYTES = 64 * 1024
"""Maximum of a body that is read after its stated end; the connection of a longer one is closed."""
MAX_SHOWN_CHARS = 80
"""Maximum length of a header's value in an error."""
_TOO_LONG = "Got more than"
"""Beginning of aiohttp's error for a line, or a number of headers, beyond its limits (8190 bytes, 128)."""
_LOCAL_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Errors of connect(2) and socket(2) that say nothing about the server."""


class _WatchedConnection(ResponseHandler):
    """One connection, which is closed as soon as it receives anything while it is idle."""

    def __init__(self, loop: "asyncio.AbstractEventLoop") -> None:
        super().__init__(loop)
        self._is_idle = False

    def rest(self) -> None:
        """Mark the connection as idle."""
        self._is_idle = True

    def resume(self) -> bool:
        """Mark the connection as in use; returns whether it may be used: it is new, or nothing came in between."""
        was_idle, self._is_idle = self._is_idle, False
        return not was_idle or not (self.should_close or self._has_unread_bytes())

    def data_received(self, data: bytes) -> None:
        """Pass bytes of an answer to the parser. Bytes of an idle connection are dropped, and the connection too."""
        if self._is_idle and data:  # aiohttp calls it without data to go on with what it holds
            self.close()
            return
        super().data_received(data)
        # The answer may have ended within `data`, which released the connection; the rest is then a second answer.
        if self._is_idle and self.should_close:
            self.close()

    def _has_unread_bytes(self) -> bool:
        """Whether bytes, or the end of the connection, wait in the kernel that the event loop has not yet read."""
        found = None if self.transport is None else self.transport.get_extra_info("socket")
        if found is None:
            return False
        poll = select.poll()
        poll.register(found.fileno(), select.POLLIN)
        return bool(poll.poll(0))


class _QuietPool(aiohttp.BaseConnector):
    """A connection pool that hands out no connection on which the server has sent anything while idle.

    `_factory` and `_release` are private to aiohttp: its public interface does not cover how connections are pooled.
    `tests/component/runner/test_pooled_connections.py` fails if a new version changes them.
    """

    def watch_connections(self) -> None:
        """Make every new connection one that is watched."""
        watched: type[ResponseHandler] = _WatchedConnection
        self._factory = partial(watched, loop=self._loop)

    async def connect(
        self, req: "ClientRequest", traces: "list[Trace]", timeout: aiohttp.ClientTimeout
    ) -> "Connection":
        """Returns a connection for one request, from the pool or new."""
        # Ends: each connection that is refused leaves the pool, and a new one is never refused.
        while True:
            connection = await super().connect(req, traces, timeout)
            protocol = connection.protocol
            if not isinstance(protocol, _WatchedConnection) or protocol.resume():
                return connection
            connection.close()

    def _release(self, key: "ConnectionKey", protocol: ResponseHandler, *, should_close: bool = False) -> None:
        if isinstance(protocol, _WatchedConnection):
            protocol.rest()
        super()._release(key, protocol, should_close=should_close)


class QuietConnector(_QuietPool, aiohttp.TCPConnector):
    """Such a pool for a server that listens on a port."""

    def __init__(self, *, keepalive_timeout: float) -> None:
        """The number of connections is not limited here: the runner's slots limit it."""
        super().__init__(limit=0, keepalive_timeout=keepalive_timeout)
        self.watch_connections()


class QuietSocketConnector(_QuietPool, aiohttp.UnixConnector):
    """Such a pool for a server that listens on a Unix socket."""

    def __init__(self, path: str, *, keepalive_timeout: float) -> None:
        """The number of connections is not limited here: the runner's slots limit it."""
        super().__init__(path, limit=0, keepalive_timeout=keepalive_timeout)
        self.watch_connections()


def is_closed_unanswered(error: aiohttp.ClientError) -> bool:
    """Whether an established connection was closed or reset before a byte of an answer."""
    is_connection = isinstance(error, aiohttp.ClientConnectionError)
    if isinstance(error, aiohttp.ServerDisconnectedError) and not isinstance(error.message, str):
        return False  # the message is the part of a head that has arrived
    return is_connection and not isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError))


def local_shortage(error: aiohttp.ClientConnectorError) -> WeftError | None:
    """Returns the error where this process cannot open any connection; None: another cause."""
    number = error.os_error.errno
    if number not in _LOCAL_SHORTAGES:
        return None
    message = f"this runner can open no connection to its backend now: {os.strerror(number)}"
    return WeftError(Reason.BACKEND_NOT_READY, message)


def unreached(error: aiohttp.ClientConnectorError) -> str:
    """Returns why no connection was made."""
    match error:
        case aiohttp.ClientConnectorDNSError():
            return "its name is not known"
        case aiohttp.ClientSSLError():
            return "no secure connection, its certificate is not trusted or it does not speak TLS"
        case _:
            return "it takes no connection, or no secure one"


def head_fault(error: aiohttp.ClientError) -> str:
    """Returns the fault of an answer's head, without any of its content."""
    is_long = isinstance(error, aiohttp.ClientResponseError) and error.message.startswith(_TOO_LONG)
    return "its head is too long" if is_long else "its head cannot be read"


def require_content_type(response: aiohttp.ClientResponse, expected: str) -> None:
    """Raises BACKEND_PROTOCOL_ERROR for an answer of another media type."""
    if response.content_type != expected:
        raise WeftError(
            Reason.BACKEND_PROTOCOL_ERROR, f"the engine answered with {shown(response.content_type)}, not {expected}"
        )


def content_encoding(response: aiohttp.ClientResponse) -> str | None:
    """Returns the encoding of an answer's body, which no request accepts; None: not encoded."""
    encoding = response.headers.get("Content-Encoding", "").strip().lower()
    return None if encoding in ("", "identity") else encoding


def require_plain(response: aiohttp.ClientResponse) -> None:
    """Raises BACKEND_PROTOCOL_ERROR for an encoded body."""
    if (encoding := content_encoding(response)) is not None:
        message = f"the engine answered with Content-Encoding {shown(encoding)}, which it was not asked for"
        raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, message)


def shown(header: str) -> str:
    """Returns a header's value for an error, in ASCII: aiohttp lets through bytes that are no text."""
    return ascii(header[:MAX_SHOWN_CHARS])


async def drain(response: aiohttp.ClientResponse) -> None:
    """Read the rest of a body whose content is complete, so that its connection can be used again."""
    with suppress(TimeoutError, aiohttp.ClientError):
        await within(DRAIN_SECONDS, _read_rest(response))


async def _read_rest(response: aiohttp.ClientResponse) -> None:
    left_bytes = MAX_DRAIN_BYTES
    while left_bytes > 0 and (chunk := await response.content.readany()):
        left_bytes -= len(chunk)


async def read_bounded(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    """Returns the whole body. Raises BACKEND_PROTOCOL_ERROR beyond the limit."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > limit_bytes:
            raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, f"the engine's answer is over {limit_bytes} bytes")
    return bytes(body)


async def read_beginning(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    """Returns the first bytes of a body."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) >= limit_bytes:
            break
    return bytes(body[:limit_bytes])


def release(response: aiohttp.ClientResponse) -> None:
    """Return a connection whose response was read to its end to the pool; close any other, which cancels the work."""
    response.release() if response.content.at_eof() else response.close()
