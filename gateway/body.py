"""Reading a request's body, within its limits."""

import asyncio

from starlette.types import Receive, Scope

from gateway.config import GatewayConfig
from gateway.errors import ClientGoneError, EdgeError
from gateway.identity import Headers, headers_of
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

_YAML_TYPES = frozenset({b"application/yaml", b"application/x-yaml"})


async def read_json_body(scope: Scope, receive: Receive, config: GatewayConfig) -> bytes:
    """The whole body, which must be declared as JSON.

    Raises MALFORMED_REQUEST for another content type, REQUEST_TOO_LARGE above `max_body_bytes`, an EdgeError 408 if it
    does not arrive in time, ClientGoneError if the caller hangs up first.
    """
    headers = headers_of(scope)
    if not _is_json(_media_type(headers)):
        raise WeftError(Reason.MALFORMED_REQUEST, "the Content-Type must be application/json")
    return await _read_body(headers, receive, config)


async def read_json_or_yaml_body(scope: Scope, receive: Receive, config: GatewayConfig) -> tuple[bytes, bool]:
    """The whole body and whether it is YAML; it must be declared as either. Raises as `read_json_body`."""
    headers = headers_of(scope)
    media_type = _media_type(headers)
    is_yaml = media_type in _YAML_TYPES
    if not (is_yaml or _is_json(media_type)):
        raise WeftError(Reason.MALFORMED_REQUEST, "the Content-Type must be application/json or application/yaml")
    return await _read_body(headers, receive, config), is_yaml


async def _read_body(headers: Headers, receive: Receive, config: GatewayConfig) -> bytes:
    if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
        raise WeftError(Reason.MALFORMED_REQUEST, "a Content-Encoding is not supported: send the body as it is")
    _require_length_fits(headers, config)
    try:
        async with asyncio.timeout(config.body_timeout_seconds):
            return await _read(receive, config.max_body_bytes)
    except TimeoutError:
        raise EdgeError(
            408,
            Reason.DEADLINE_EXCEEDED,
            f"the body did not arrive within {config.body_timeout_seconds:g} seconds",
        ) from None


def _media_type(headers: Headers) -> bytes:
    # Also a guard: a page of another origin can send text/plain without asking, JSON and YAML only after a preflight.
    return headers.get(b"content-type", b"").partition(b";")[0].strip().lower()


def _is_json(media_type: bytes) -> bool:
    kind, _, subtype = media_type.partition(b"/")
    return kind == b"application" and (subtype == b"json" or subtype.endswith(b"+json"))


def _require_length_fits(headers: Headers, config: GatewayConfig) -> None:
    declared = headers.get(b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > config.max_body_bytes:
        raise _too_large(config.max_body_bytes)


async def _read(receive: Receive, max_bytes: int) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        piece = message.get("body", b"")
        size += len(piece)
        if size > max_bytes:
            raise _too_large(max_bytes)
        pieces.append(piece)
        if not message.get("more_body", False):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _too_large(max_bytes: int) -> WeftError:
    return WeftError(Reason.REQUEST_TOO_LARGE, f"the body is larger than {max_bytes} bytes")
