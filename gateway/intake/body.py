"""Reads a request's body within its limits."""

import asyncio
import codecs
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Depends
from pydantic import BaseModel
from starlette.requests import Request
from starlette.types import Receive, Scope

from gateway.errors import ClientGoneError, Dialect, EdgeError, dialect_of
from gateway.gateway_config import GatewayConfig
from gateway.http.framing import DECLARED_BODY_KEY
from gateway.intake.json_guard import parse, require_few_members
from gateway.intake.multipart import MultipartStream, Part, boundary_of
from gateway.request_facts import Headers, headers_of
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.text.content_coding import BodyDecoder
from weft.kernel.time.clock import within

_CODINGS = frozenset({"gzip", "x-gzip", "zstd"})
_ACCEPTED = b"gzip, zstd"


def decoder_of(headers: Iterable[tuple[bytes, bytes]]) -> BodyDecoder | None:
    """Returns the decoder of a body; None: not compressed. Raises an EdgeError 415 for any other coding."""
    named = b",".join(value for name, value in headers if name == b"content-encoding")
    codings = [coding for coding in named.decode("latin-1").lower().replace(" ", "").split(",") if coding]
    codings = [coding for coding in codings if coding != "identity"]
    if not codings:
        return None
    if len(codings) > 1 or codings[0] not in _CODINGS:
        raise EdgeError(
            415,
            Reason.MALFORMED_REQUEST,
            "the Content-Encoding must be gzip or zstd, once: compress the body with one of them, or send it as it is",
            headers=((b"accept-encoding", _ACCEPTED),),
        )
    return BodyDecoder(codings[0])


def decoded(coded: bytes, decoder: BodyDecoder, max_bytes: int) -> bytes:
    """Decodes a complete body, at most `max_bytes` + 1 bytes: a result longer than `max_bytes` is too large."""
    parts = [decoder.decode(coded, max_bytes + 1)]
    size = len(parts[0])
    while decoder.has_more and size <= max_bytes:
        parts.append(decoder.decode(b"", max_bytes + 1 - size))
        size += len(parts[-1])
    if not decoder.has_more:
        decoder.require_end()
    return b"".join(parts)


ModelT = TypeVar("ModelT", bound=BaseModel)

_YAML_TYPES = frozenset({b"application/yaml", b"application/x-yaml"})
_JSON_TYPE = b"application/json"
_FORM_TYPE = b"multipart/form-data"
_MAX_LENGTH_DIGITS = 20
_DECODED_STEP_BYTES = 64 * 1024
"""Maximum decoded bytes of a body before other requests run."""
_OF_PAGES = frozenset({b"origin", b"referer", b"sec-fetch-site"})
"""Headers that browsers send for a page. Its scripts cannot leave all of them out."""


async def read_json_body(scope: Scope, receive: Receive, config: GatewayConfig) -> bytes:
    """Returns the complete body, which must be declared as JSON; see `_require_json_type`.

    Raises MALFORMED_REQUEST for another content type, REQUEST_TOO_LARGE above `max_body_bytes` or `max_json_members`,
    and otherwise as `read_body`.
    """
    _require_json_type(scope)
    return await _read_json(scope, receive, config)


def _require_json_type(scope: Scope) -> None:
    """Rejects a body that is not declared as JSON.

    Ollama accepts any content type, and the curl commands of its documentation declare a form. Ollama's paths here do
    the same, unless a browser sent the request for a page.
    """
    headers = headers_of(scope)
    if headers.get(b"content-type") == _JSON_TYPE or _is_json(_media_type(headers)):
        return
    if dialect_of(scope["path"], headers) is not Dialect.OLLAMA or not _OF_PAGES.isdisjoint(headers):
        raise WeftError(
            Reason.MALFORMED_REQUEST,
            "the Content-Type must be application/json (curl -H 'Content-Type: application/json')",
        )


async def read_model(request: Request, schema: type[ModelT], config: GatewayConfig) -> ModelT:
    """Returns the JSON body as `schema`. Raises as `read_json_body` and `parse`."""
    raw = await read_json_body(request.scope, request.receive, config)
    return parse(schema, raw, max_depth=config.limits.max_json_depth)


@dataclass(frozen=True, slots=True)
class JsonBody:
    """A handler's dependency on the JSON body of its request; the route documents the schema."""

    schema: type[BaseModel]

    async def __call__(self, request: Request) -> BaseModel:
        """Reads the body. Raises as `read_model`."""
        return await read_model(request, self.schema, request.scope["app"].config)


def body_of(schema: type[BaseModel]) -> Any:
    """Returns the dependency on a JSON body."""
    return Depends(JsonBody(schema))


async def read_json_or_yaml_body(scope: Scope, receive: Receive, config: GatewayConfig) -> tuple[bytes, bool]:
    """Returns the complete body, declared as JSON or YAML, and whether it is YAML. Raises as `read_json_body`."""
    media_type = media_type_of(scope)
    if media_type in _YAML_TYPES:
        return await _read_text(scope, receive, config), True
    if not _is_json(media_type):
        raise WeftError(Reason.MALFORMED_REQUEST, "the Content-Type must be application/json or application/yaml")
    return await _read_json(scope, receive, config), False


async def read_multipart_body(scope: Scope, receive: Receive, config: GatewayConfig, *, max_bytes: int) -> list[Part]:
    """Returns the parts of a multipart form, in order. Raises as `body_chunks`.

    Raises MALFORMED_REQUEST for another content type or an invalid form, REQUEST_TOO_LARGE for too many parts or too
    long headers.
    """
    boundary = multipart_boundary(scope)
    timeout_seconds = config.body_timeout_seconds
    chunks = body_chunks(scope, receive, config, max_bytes=max_bytes, timeout_seconds=timeout_seconds)
    async with aclosing(chunks):
        return await MultipartStream(chunks, boundary, config.limits).parts()


def media_type_of(scope: Scope) -> bytes:
    """Returns the media type of the body, in lower case and without parameters."""
    return _media_type(headers_of(scope))


def is_form(scope: Scope) -> bool:
    """Whether the body is declared as a form with files."""
    return media_type_of(scope) == _FORM_TYPE


def multipart_boundary(scope: Scope) -> bytes:
    """Returns the boundary of a form with files. Raises MALFORMED_REQUEST for another content type."""
    headers = headers_of(scope)
    if _media_type(headers) != _FORM_TYPE:
        raise WeftError(Reason.MALFORMED_REQUEST, "the Content-Type must be multipart/form-data")
    return boundary_of(headers.get(b"content-type", b""))


async def body_chunks(
    scope: Scope, receive: Receive, config: GatewayConfig, *, max_bytes: int, timeout_seconds: float
) -> AsyncGenerator[bytes]:
    """Yields the decoded body as it arrives. Only the time spent waiting for the caller counts.

    Raises an EdgeError 415 for an unknown coding, MALFORMED_REQUEST if decoding fails, REQUEST_TOO_LARGE above
    `max_bytes`, an EdgeError 408 if the body is late or too slow, ClientGoneError if the caller disconnects first.
    """
    arriving = _ArrivingBody(scope, receive, config, max_bytes=max_bytes, timeout_seconds=timeout_seconds)
    while not arriving.is_complete:
        yield await arriving.next()


async def read_body(scope: Scope, receive: Receive, config: GatewayConfig, *, max_bytes: int) -> bytes:
    """Returns the complete body. Raises as `body_chunks`."""
    timeout_seconds = config.body_timeout_seconds
    arriving = _ArrivingBody(scope, receive, config, max_bytes=max_bytes, timeout_seconds=timeout_seconds)
    chunks: list[bytes] = []
    while not arriving.is_complete:
        chunks += await arriving.next_whole()
    return b"".join(chunks)


class _ArrivingBody:
    """A body with limits for its size (before and after decoding), time and pace."""

    __slots__ = (
        *("_config", "_decoded_bytes", "_decoder", "_has_arrived", "_max_bytes", "_receive", "_scope", "_size"),
        *("_timeout_seconds", "_waited", "is_complete"),
    )

    def __init__(
        self, scope: Scope, receive: Receive, config: GatewayConfig, *, max_bytes: int, timeout_seconds: float
    ) -> None:
        """Raises an EdgeError 415 for an unknown coding, REQUEST_TOO_LARGE if the declared length is too large."""
        headers = headers_of(scope)
        declared = headers.get(b"content-length")
        if declared is not None and declared.isdigit() and int(declared[:_MAX_LENGTH_DIGITS]) > max_bytes:
            raise too_large(max_bytes)
        self._decoder = decoder_of(scope["headers"]) if b"content-encoding" in headers else None
        self._decoded_bytes = 0
        self._has_arrived = False
        self._scope = scope
        self._receive = receive
        self._max_bytes = max_bytes
        self._config = config
        self._timeout_seconds = timeout_seconds
        self._waited = 0.0
        """Seconds spent waiting for the caller."""
        self._size = 0
        self.is_complete = False

    async def next(self) -> bytes:
        """Returns the next chunk, until the body is complete. Raises as `body_chunks`."""
        if self._decoder is None:
            chunk = await self._arriving()
            self.is_complete = self._has_arrived
            return chunk
        data = b"" if self._decoder.has_more else await self._arriving()
        async with self._turn:
            await asyncio.sleep(0)
            return self._decoded(self._decoder, data)

    async def next_whole(self) -> list[bytes]:
        """Returns all chunks of what arrives next. Of many bodies that expand, only one at a time is held expanded."""
        if self._decoder is None:
            return [await self.next()]
        data = await self._arriving()
        async with self._turn:
            chunks = [self._decoded(self._decoder, data)]
            while self._decoder.has_more:
                await asyncio.sleep(0)
                chunks.append(self._decoded(self._decoder, b""))
        return chunks

    @property
    def _turn(self) -> asyncio.Lock:
        """Held while a body decodes a step, so that other requests run between two steps of any bodies."""
        turn: asyncio.Lock = self._scope["app"].decoding
        return turn

    def _decoded(self, decoder: BodyDecoder, data: bytes) -> bytes:
        chunk = decoder.decode(data, _DECODED_STEP_BYTES)
        self._decoded_bytes += len(chunk)
        if self._decoded_bytes > self._max_bytes:
            raise too_large(self._max_bytes)
        if self._has_arrived and not decoder.has_more:
            decoder.require_end()
            self.is_complete = True
        return chunk

    async def _arriving(self) -> bytes:
        """Returns the next chunk as sent. The allowed time grows with the bytes received."""
        pace, loop = self._config.connections, asyncio.get_running_loop()
        allowed = min(self._timeout_seconds, pace.body_grace_seconds + self._size / pace.min_body_bytes_per_second)
        began = loop.time()
        try:
            message = await within(allowed - self._waited, self._receive())
        except TimeoutError:
            raise _too_slow(self._config, self._waited + loop.time() - began, self._timeout_seconds) from None
        self._waited += loop.time() - began
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        chunk: bytes = message.get("body", b"")
        self._size += len(chunk)
        # The current chunk has declared its length.
        declared: int = self._scope.get("state", {}).get(DECLARED_BODY_KEY, 0)
        if self._size > self._max_bytes or declared > self._max_bytes:
            raise too_large(self._max_bytes)
        self._has_arrived = not message.get("more_body", False)
        return chunk


async def _read_json(scope: Scope, receive: Receive, config: GatewayConfig) -> bytes:
    raw = await _read_text(scope, receive, config)
    require_few_members(raw, config.limits.max_json_members)
    return raw


async def _read_text(scope: Scope, receive: Receive, config: GatewayConfig) -> bytes:
    """Returns the complete body without a byte order mark, which PowerShell, .NET and editors write."""
    return (await read_body(scope, receive, config, max_bytes=config.max_body_bytes)).removeprefix(codecs.BOM_UTF8)


def _media_type(headers: Headers) -> bytes:
    # Also a CSRF guard: a foreign page can send text/plain without a preflight, but not JSON or YAML.
    return headers.get(b"content-type", b"").partition(b";")[0].strip().lower()


def _is_json(media_type: bytes) -> bool:
    if media_type == _JSON_TYPE:
        return True
    kind, _, subtype = media_type.partition(b"/")
    return kind == b"application" and (subtype == b"json" or subtype.endswith(b"+json"))


def too_large(max_bytes: int) -> WeftError:
    """Returns the error of a body above the limit."""
    return WeftError(Reason.REQUEST_TOO_LARGE, f"the body is larger than {max_bytes} bytes")


def _too_slow(config: GatewayConfig, seconds: float, limit: float) -> WeftError:
    rate = config.connections.min_body_bytes_per_second
    late = f"the body did not arrive within {limit:g} seconds"
    slow = f"the body arrived more slowly than {rate} bytes per second"
    return EdgeError(408, Reason.DEADLINE_EXCEEDED, late if seconds >= limit else slow)
