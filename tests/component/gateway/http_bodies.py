"""Bodies of requests to all endpoints that take JSON, handled by a gateway without a network."""

import asyncio
from collections.abc import MutableMapping
from functools import cache
from typing import Any

from bad_inputs_server import CONFIG, forgetful_ports
from bad_inputs_stage import ENDPOINTS, good_body, takes_json
from gateway_script import app_of

from gateway.routing import EdgeApp

ANSWER_SECONDS = 10.0
TARGETS = tuple(endpoint for endpoint in ENDPOINTS if takes_json(endpoint))


@cache
def _gateway() -> tuple[asyncio.AbstractEventLoop, EdgeApp]:
    loop = asyncio.new_event_loop()
    return loop, loop.run_until_complete(_made())


async def _made() -> EdgeApp:
    return app_of(CONFIG, forgetful_ports())


def close() -> None:
    """Ends the loop of the gateway, if there is one."""
    if _gateway.cache_info().currsize:
        _gateway()[0].close()
        _gateway.cache_clear()


def good_requests() -> list[bytes]:
    """Returns a valid input for each endpoint."""
    return [bytes([number]) + good_body(endpoint) for number, endpoint in enumerate(TARGETS)]


def send_body(content: bytes) -> int:
    """Sends a body to the endpoint whose number is the first byte; returns the status. Raises for an internal error."""
    loop, app = _gateway()
    status, answer = loop.run_until_complete(asyncio.wait_for(_answer(app, content), ANSWER_SECONDS))
    assert status != 500, answer
    return status


async def _answer(app: EdgeApp, content: bytes) -> tuple[int, bytes]:
    endpoint, body = TARGETS[content[0] % len(TARGETS) if content else 0], content[1:]
    is_sent, status, answer = False, 0, bytearray()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": endpoint.method,
        "scheme": "http",
        "path": endpoint.address,
        "raw_path": endpoint.address.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"host", b"localhost"),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
        "client": ("127.0.0.1", 50_000),
        "server": ("127.0.0.1", 8000),
        "state": {},
    }

    async def receive() -> MutableMapping[str, Any]:
        nonlocal is_sent
        if is_sent:
            await asyncio.Event().wait()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            answer.extend(message.get("body", b""))

    await app(scope, receive, send)
    return status, bytes(answer)
