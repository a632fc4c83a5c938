"""Reading an HTTP server's answers, within bounds."""

import asyncio
from contextlib import suppress

import aiohttp

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

DRAIN_SECONDS = 1.0


def require_content_type(response: aiohttp.ClientResponse, expected: str) -> None:
    """Raises BACKEND_PROTOCOL_ERROR for an answer of another media type."""
    if response.content_type != expected:
        raise WeftError(
            Reason.BACKEND_PROTOCOL_ERROR, f"the backend answered with {response.content_type}, not {expected}"
        )


async def drain(response: aiohttp.ClientResponse) -> None:
    """Read the end of a body that has said all it has to say, so that its connection can be used again."""
    with suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(DRAIN_SECONDS):
            while await response.content.readany():
                pass


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
