"""Reading an HTTP server's answers, within bounds, and what it means where there is none."""

import asyncio
import errno
import os
from contextlib import suppress

import aiohttp

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

DRAIN_SECONDS = 1.0
MAX_DRAIN_BYTES = 64 * 1024
"""Of a body after its end by its own word; one that goes on longer costs its connection."""
MAX_SHOWN_CHARS = 80
"""Of a header's value in an error."""
_TOO_LONG = "Got more than"
"""How aiohttp begins what it says about a line, or a number of headers, beyond its limits (8190 bytes, 128)."""
_LOCAL_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Errors of connect(2) and socket(2) that say nothing about the server."""


def is_closed_unanswered(error: aiohttp.ClientError) -> bool:
    """Whether a connection that was made ended before an answer: closed or reset, and not with bytes that are none."""
    is_connection = isinstance(error, aiohttp.ClientConnectionError)
    if isinstance(error, aiohttp.ServerDisconnectedError) and not isinstance(error.message, str):
        return False  # the message is what has arrived of a head
    return is_connection and not isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError))


def local_shortage(error: aiohttp.ClientConnectorError) -> WeftError | None:
    """The error where this process could open no connection whatever the server does; None: another cause."""
    number = error.os_error.errno
    if number not in _LOCAL_SHORTAGES:
        return None
    message = f"this runner can open no connection to its backend now: {os.strerror(number)}"
    return WeftError(Reason.BACKEND_NOT_READY, message)


def unreached(error: aiohttp.ClientConnectorError) -> str:
    """Why no connection was made."""
    match error:
        case aiohttp.ClientConnectorDNSError():
            return "its name is not known"
        case aiohttp.ClientSSLError():
            return "no secure connection, its certificate is not trusted or it does not speak TLS"
        case _:
            return "it takes no connection, or no secure one"


def head_fault(error: aiohttp.ClientError) -> str:
    """What is wrong with an answer's head, without a byte of it."""
    is_long = isinstance(error, aiohttp.ClientResponseError) and error.message.startswith(_TOO_LONG)
    return "its head is too long" if is_long else "its head cannot be read"


def require_content_type(response: aiohttp.ClientResponse, expected: str) -> None:
    """Raises BACKEND_PROTOCOL_ERROR for an answer of another media type."""
    if response.content_type != expected:
        raise WeftError(
            Reason.BACKEND_PROTOCOL_ERROR, f"the backend answered with {shown(response.content_type)}, not {expected}"
        )


def content_encoding(response: aiohttp.ClientResponse) -> str | None:
    """How an answer's body is packed, which it was not asked to be; None: not at all."""
    encoding = response.headers.get("Content-Encoding", "").strip().lower()
    return None if encoding in ("", "identity") else encoding


def require_plain(response: aiohttp.ClientResponse) -> None:
    """Raises BACKEND_PROTOCOL_ERROR for a body that is packed."""
    if (encoding := content_encoding(response)) is not None:
        message = f"the backend answered with Content-Encoding {shown(encoding)}, which it was not asked for"
        raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, message)


def shown(header: str) -> str:
    """The value of a header as it may stand in an error: ASCII, since aiohttp lets through bytes that are no text."""
    return ascii(header[:MAX_SHOWN_CHARS])


async def drain(response: aiohttp.ClientResponse) -> None:
    """Read the end of a body that has said all it has to say, so that its connection can be used again."""
    left_bytes = MAX_DRAIN_BYTES
    with suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(DRAIN_SECONDS):
            while left_bytes > 0 and (chunk := await response.content.readany()):
                left_bytes -= len(chunk)


async def read_bounded(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    """The whole body. Raises BACKEND_PROTOCOL_ERROR beyond the limit."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > limit_bytes:
            raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, f"the backend's answer is over {limit_bytes} bytes")
    return bytes(body)


async def read_beginning(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    """The first bytes of a body."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) >= limit_bytes:
            break
    return bytes(body[:limit_bytes])


def let_go(response: aiohttp.ClientResponse) -> None:
    """A connection that was read to its end goes back to the pool; any other is closed, which cancels the work."""
    response.release() if response.content.at_eof() else response.close()
