"""GET /api/v1/events, as a list and as a stream."""

import asyncio
import json

import pytest
from gateway_script import head, serving
from registry_script import ScriptedRegistry, event

from gateway.gateway_config import GatewayConfig
from weft.api.registry.v1.registry_service_pb2 import WatchEventsRequest
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

EVENTS = "/api/v1/events"
WATCH = f"{EVENTS}?watch=1"
QUICK = GatewayConfig(port=0, headers_within_seconds=0.02, sse_keepalive_seconds=0.02)


def request_for(path: str) -> bytes:
    return head(f"GET {path} HTTP/1.1", {"Host": "localhost"})


async def test_invalid_query_parameter_is_reported() -> None:
    registry = ScriptedRegistry()
    async with serving(registry=registry) as gateway:
        for query, param in (
            ("kind=demon", "kind"),
            ("name=tiny", "kind"),
            ("kind=model&name=../x", "name"),
            ("kind=model&name=", "name"),
            ("limit=0", "limit"),
            ("limit=1001", "limit"),
            ("watch=yes", "watch"),
            ("watch=1&limit=5", "limit"),
            ("follow=1", "follow"),
        ):
            error = (await gateway.request("GET", f"{EVENTS}?{query}")).of(400)["error"]
            assert (error["code"], error["param"]) == ("invalid_argument", param)
    assert registry.asked == []


async def test_watch_sends_each_event_immediately_and_comments_between() -> None:
    gate = asyncio.Event()
    registry = ScriptedRegistry(watch_steps=[event(1), gate, event(2), asyncio.Event()])
    async with serving(registry=registry, config=QUICK) as gateway, gateway.connection() as (reader, writer):
        writer.write(request_for(f"{WATCH}&kind=model&name=tiny"))
        top = await reader.readuntil(b"\r\n\r\n")
        first = await reader.readuntil(b"}\n\n")
        await reader.readuntil(b": keepalive\n\n")
        gate.set()
        second = await reader.readuntil(b"}\n\n")
    assert b"200" in top.split(b"\r\n")[0]
    assert b"text/event-stream" in top
    assert b"id: 1\ndata: {" in first
    assert b"id: 2\ndata: {" in second
    assert registry.asked == [("watch", WatchEventsRequest(kind="model", name="tiny"))]


@pytest.mark.parametrize(
    ("failure", "code"),
    [(WeftError(Reason.WATCH_LAGGED, "read faster"), "watch_lagged"), (ZeroDivisionError("a bug"), "internal")],
)
async def test_error_after_an_event_is_the_last_event(failure: Exception, code: str) -> None:
    async with serving(registry=ScriptedRegistry(watch_steps=[event(1), failure])) as gateway:
        response = await gateway.request("GET", WATCH)
    assert response.status == 200
    last = response.body.decode().strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == code


async def open_watch(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(request_for(WATCH))
    await reader.readuntil(b"}\n\n")


async def test_watch_over_the_limit_returns_429_until_another_ends() -> None:
    registry = ScriptedRegistry(watch_steps=[event(1), asyncio.Event()])
    config = GatewayConfig(port=0, max_event_watches=1)
    async with serving(registry=registry, config=config) as gateway:
        async with gateway.connection() as (reader, writer):
            await open_watch(reader, writer)
            refused = await gateway.request("GET", WATCH)
            assert (await gateway.request("GET", EVENTS)).status == 200
        await registry.was_closed.wait()
        async with gateway.connection() as (reader, writer):
            await open_watch(reader, writer)
    assert refused.of(429)["error"]["code"] == "rate_limit_exceeded"
    assert refused.headers["retry-after"]


async def test_watch_does_not_delay_gateway_shutdown() -> None:
    registry = ScriptedRegistry(watch_steps=[event(1), asyncio.Event()])
    async with serving(registry=registry) as gateway, gateway.connection() as (reader, writer):
        await open_watch(reader, writer)
        async with asyncio.timeout(30):
            await gateway.service.stop(grace_seconds=3600)
        rest = await reader.read()
    assert b'"code":"shutting_down"' in rest
