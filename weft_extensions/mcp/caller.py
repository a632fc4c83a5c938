"""The caller of one MCP message, in whose name tools call endpoints of the same gateway."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from gateway.auth.authentication import HOME_SOCKET, OWN_USER_KEY
from gateway.deps import GatewayDeps
from gateway.errors import DetailedError
from gateway.ports import GatewayPorts
from weft.kernel.errors.reasons import Reason
from weft.kernel.text.json_lines import encode_json

Document = dict[str, Any]
_SCOPE = ("type", "asgi", "http_version", "scheme", "server", "client", "root_path", HOME_SOCKET)
_HEADERS = frozenset({b"host", b"authorization", b"x-api-key", b"x-tenant-id", b"traceparent"})
"""Who calls. Others belong to the message: its format, deadline and priority."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Calls endpoints with the key of a message. Each call passes the gateway's checks, limits, metrics and log."""

    scope: Scope
    deps: GatewayDeps
    ports: GatewayPorts

    async def call(self, path: str, body: Document | None = None, **query: object) -> Document:
        """Returns what a GET answers, with a body a POST. Leaves out empty parameters. Raises DetailedError."""
        headers = [each for each in self.scope["headers"] if each[0] in _HEADERS]
        given = {name: 1 if value is True else value for name, value in query.items() if value}
        state = self.scope.get("state", {})
        scope = {name: self.scope[name] for name in _SCOPE if name in self.scope} | {
            "method": "GET" if body is None else "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": urlencode(given).encode(),
            "headers": [*headers, (b"content-type", b"application/json")],
            "state": {OWN_USER_KEY: state[OWN_USER_KEY]} if OWN_USER_KEY in state else {},
        }
        answer = await collected(self.scope["app"], scope, b"" if body is None else encode_json(body))
        found: Document = msgspec.json.decode(answer.body)
        if answer.status_code < 400:
            return found
        raise DetailedError(Reason.INVALID_ARGUMENT, found["error"]["message"], code=found["error"]["code"])


async def collected(app: Callable[[Scope, Receive, Send], Awaitable[None]], scope: Scope, body: bytes) -> Response:
    """Calls an ASGI application with a whole body, and returns its whole answer."""
    answer, left = Response(), [body]

    async def receive() -> Message:
        # A caller who leaves cancels this task instead.
        return {"type": "http.request", "body": left.pop() if left else await asyncio.Future[bytes]()}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status_code, answer.raw_headers = message["status"], list(message["headers"])
        answer.body = bytes(answer.body) + message.get("body", b"")

    await app(scope, receive, send)
    return answer
