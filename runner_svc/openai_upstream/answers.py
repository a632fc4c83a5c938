"""Bounded reading of a server's responses, and texts for their faults."""

from collections.abc import AsyncIterator
from contextlib import suppress

from runner_svc.engine_http.answer import Answer
from runner_svc.engine_http.faults import BadHeadError, HttpFaultError, Unconnected, UnconnectedError
from runner_svc.openai_upstream.errors import REPEATS
from weft.kernel.errors.error_tree import WeftError, quoting_engine
from weft.kernel.errors.reasons import Reason
from weft.kernel.text.content_coding import CODINGS
from weft.kernel.time.clock import within

DRAIN_SECONDS = 1.0
MAX_DRAIN_BYTES = 64 * 1024
"""Maximum number of bytes read after the end of the stream; beyond it the connection is closed."""
MAX_SHOWN_CHARS = 80
"""Maximum length of a header value in an error message."""


def shortage(fault: UnconnectedError) -> WeftError | None:
    """Returns the error if this process cannot open any connection; None: another cause."""
    if fault.why is not Unconnected.SHORTAGE:
        return None
    message = f"this runner cannot open a connection to its backend now: {fault.words}"
    return WeftError(Reason.BACKEND_NOT_READY, message)


def unreached(fault: UnconnectedError) -> str:
    """Returns why no connection was made."""
    match fault.why:
        case Unconnected.UNKNOWN_NAME:
            return "its name is not known"
        case Unconnected.UNTRUSTED:
            return "TLS failed: its certificate is not trusted, or it does not use TLS"
        case Unconnected.FORBIDDEN:
            return f"its address {fault.words}, which weft does not connect to"
        case _:
            return "it does not accept connections, or not with TLS"


def head_fault(fault: HttpFaultError) -> str:
    """Returns a description of a faulty response head that quotes none of it."""
    is_long = isinstance(fault, BadHeadError) and fault.is_long
    return "its headers are too long" if is_long else "its headers cannot be parsed"


def require_content_type(answer: Answer, expected: str) -> None:
    """Raises BACKEND_PROTOCOL_ERROR if the response has another media type."""
    if answer.content_type != expected:
        message = f"the engine answered with {shown(answer.content_type)}, not {expected}"
        error = WeftError(Reason.BACKEND_PROTOCOL_ERROR, message, metadata=REPEATS)
        raise quoting_engine(error, f"the engine answered with another media type than {expected}")


def content_encoding(answer: Answer) -> str | None:
    """Returns the content encoding that is not decoded; None: the body is readable."""
    return None if not answer.coding or answer.coding in CODINGS else answer.coding


def require_plain(answer: Answer) -> None:
    """Raises BACKEND_PROTOCOL_ERROR if the body has an encoding that is not decoded."""
    if (encoding := content_encoding(answer)) is not None:
        message = f"the engine answered with Content-Encoding {shown(encoding)}, which was not requested"
        error = WeftError(Reason.BACKEND_PROTOCOL_ERROR, message, metadata=REPEATS)
        raise quoting_engine(error, "the engine answered with a Content-Encoding that was not requested")


def shown(header: str) -> str:
    """Returns a header value for an error message, in ASCII because it may contain invalid text."""
    return ascii(header[:MAX_SHOWN_CHARS])


async def drain(answer: Answer) -> None:
    """Reads the rest of a body after its content so that the connection can be reused."""
    if answer.is_complete:
        return
    with suppress(TimeoutError, HttpFaultError):
        await within(DRAIN_SECONDS, _read_rest(answer))


async def _read_rest(answer: Answer) -> None:
    left_bytes = MAX_DRAIN_BYTES
    while left_bytes > 0 and (part := await answer.read()):
        left_bytes -= len(part)


async def read_bounded(parts: AsyncIterator[bytes], limit_bytes: int) -> bytes:
    """Returns the whole body. Raises BACKEND_PROTOCOL_ERROR beyond the limit."""
    body = bytearray()
    async for part in parts:
        body += part
        if len(body) > limit_bytes:
            raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, f"the engine's answer is over {limit_bytes} bytes")
    return bytes(body)


async def read_beginning(answer: Answer, limit_bytes: int) -> bytes:
    """Returns the first `limit_bytes` of a body."""
    body = bytearray()
    while len(body) < limit_bytes and (part := await answer.read()):
        body += part
    return bytes(body[:limit_bytes])
