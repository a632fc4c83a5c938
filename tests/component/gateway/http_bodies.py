"""Bodies of requests to all endpoints that take JSON, handled by a gateway without a network."""

import asyncio
from functools import cache

from asgi_call import answer_of
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
    endpoint, body = TARGETS[content[0] % len(TARGETS) if content else 0], content[1:]
    call = answer_of(app, endpoint.method, endpoint.address, body)
    answer = loop.run_until_complete(asyncio.wait_for(call, ANSWER_SECONDS))
    assert answer.status != 500, answer
    return answer.status
