"""Calls of an application, without a network."""

import asyncio
from collections.abc import Iterable

from gateway_script import RawResponse
from starlette.types import Message, Scope

from gateway.auth.authentication import OWN_USER_KEY
from gateway.routing import EdgeApp

JSON = ((b"host", b"localhost"), (b"content-type", b"application/json"))


async def answer_of(
    app: EdgeApp, method: str, path: str, body: bytes = b"", headers: Iterable[tuple[bytes, bytes]] = ()
) -> RawResponse:
    """The answer to a body of JSON."""
    sent = [{"type": "http.request", "body": body, "more_body": False}]
    status, found, content = 0, dict[str, str](), bytearray()
    scope: Scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [*JSON, (b"content-length", str(len(body)).encode()), *headers],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "state": {OWN_USER_KEY: lambda: True},
    }

    async def receive() -> Message:
        if not sent:
            await asyncio.Event().wait()
        return sent.pop()

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            found.update((name.decode(), value.decode()) for name, value in message["headers"])
        else:
            content.extend(message.get("body", b""))

    await app(scope, receive, send)
    return RawResponse(status, found, bytes(content))
