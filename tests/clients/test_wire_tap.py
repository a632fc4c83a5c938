"""The wire between clients and the gateway changes nothing, and remembers who asked what with which key."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from wire_tap import WireTap, wire_tap


@asynccontextmanager
async def _tapped(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncGenerator[WireTap]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with wire_tap(f"http://127.0.0.1:{runner.addresses[0][1]}") as tap:
            yield tap
    finally:
        await runner.cleanup()


async def _refuse_bad(request: web.Request) -> web.Response:
    body = await request.text()
    return web.Response(text=f"you said {body}", status=400 if "bad" in body else 200)


async def _break_off(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b"data: half\n\n")
    assert request.transport is not None
    request.transport.abort()
    return response


async def test_requests_of_one_connection_are_separated_and_paired_with_their_responses() -> None:
    async with _tapped(_refuse_bad) as tap, aiohttp.ClientSession() as http:
        for number, text in enumerate(("good", "bad")):
            headers = {"Authorization": "Bearer k"} if number == 0 else {"X-Api-Key": "k"}
            async with http.post(f"{tap.url}/v1/chat?n={number}", data=text, headers=headers) as answer:
                assert await answer.text() == f"you said {text}"
        asked = tap.asked
    assert len(tap.connections) == 1
    assert [(one.method, one.path, one.query, one.body, one.status) for one in asked] == [
        ("POST", "/v1/chat", "n=0", "good", 200),
        ("POST", "/v1/chat", "n=1", "bad", 400),
    ]
    assert [(one.key_kind, one.key) for one in asked] == [("Bearer", "k"), ("x-api-key", "k")]


async def test_interrupted_answer_is_interrupted_behind_the_tap_too() -> None:
    async with _tapped(_break_off) as tap, aiohttp.ClientSession() as http, http.get(f"{tap.url}/v1/x") as answer:
        assert await answer.content.readline() == b"data: half\n"
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()


async def test_client_disconnect_is_forwarded_to_the_gateway() -> None:
    gone = asyncio.Event()

    async def wait(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"first\n")
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            gone.set()
        return response

    async with _tapped(wait) as tap, aiohttp.ClientSession() as http:
        async with http.get(f"{tap.url}/") as answer:
            assert await answer.content.readline() == b"first\n"
        async with asyncio.timeout(5.0):
            await gone.wait()


async def test_missing_gateway_closes_the_connection() -> None:
    async with wire_tap("http://127.0.0.1:9") as tap, aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.ClientConnectionError):
            await http.get(f"{tap.url}/v1/models")
    assert [(one.path, one.status) for one in tap.asked] in ([], [("/v1/models", 0)])
