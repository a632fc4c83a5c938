"""`/mcp`: the official client reads the mesh's own records, with the rights of its key and no others."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from admin_script import admin_ports
from asgi_call import answer_of
from gateway_script import FixedFleet, RunningGateway, ScriptedDispatcher, app_of, model, serving
from kit.keys import Keys, bearer
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from registry_script import ScriptedRegistry
from test_gateway_requests import ScriptedRequests, ended, waiting
from test_quotes_http import ScriptedRouter
from test_usage_http import ScriptedUsage

from gateway.endpoints import off_paths
from gateway.gateway_config import CorsConfig, GatewayConfig
from gateway.ports import GatewayPorts
from weft.dispatch.quoter import Quoter
from weft.dispatch.token_counts import PromptCounts

KEYS = Keys(
    {
        "ann000000000": ("inference:create", "inference:edit", "models:view"),
        "bob000000000": ("inference:view",),
        "admin0000000": ("*:view",),
        "metrics00000": ("telemetry:view",),
    },
    tenants={"bob000000000": "bob", "admin0000000": "ops"},
)
ANN, BOB, ADMIN = "ann000000000", "bob000000000", "admin0000000"
ONE = {"request_id": "req-1"}
MODES: list[Any] = ["legacy", "2026-07-28"]


@asynccontextmanager
async def mesh(**ports: Any) -> AsyncIterator[RunningGateway]:
    given: dict[str, Any] = {
        "keys": KEYS,
        "requests": ScriptedRequests([waiting("req-1", "ann"), waiting("req-3", "bob")]),
        "usage_source": ScriptedUsage(),
        "quotes": Quoter(ScriptedRouter(), FixedFleet.of(model("tiny")), PromptCounts()),
        "admin": admin_ports(),
    }
    async with serving(**(given | ports)) as gateway:
        yield gateway


@asynccontextmanager
async def client_of(gateway: RunningGateway, key: str = ANN, mode: Any = "auto") -> AsyncIterator[Client]:
    url = f"{gateway.service.url}/mcp"
    async with (
        httpx2.AsyncClient(headers=bearer(key), trust_env=False) as http,
        Client(streamable_http_client(url, http_client=http), mode=mode) as client,
    ):
        yield client


async def said(client: Client, name: str, arguments: Mapping[str, Any] | None = None) -> str:
    found = await client.call_tool(name, dict(arguments or {}))
    (part,) = found.content
    assert part.type == "text"
    assert not found.is_error, part.text
    return part.text


async def refused(client: Client, name: str, arguments: Mapping[str, Any] | None = None) -> str:
    found = await client.call_tool(name, dict(arguments or {}))
    (part,) = found.content
    assert part.type == "text"
    assert found.is_error, part.text
    return part.text


@pytest.mark.parametrize("mode", MODES)
async def test_client_finds_few_small_tools_that_only_read(mode: Any) -> None:
    async with mesh() as gateway, client_of(gateway, mode=mode) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        size = sum(len(tool.model_dump_json(exclude_none=True)) for tool in tools.values())
    assert tools.keys() >= {"ps", "explain", "requests", "quote", "usage"}
    assert len(tools) <= 7
    assert size <= 5_000
    for name in ("ps", "explain", "requests", "quote", "usage"):
        annotations = tools[name].annotations
        assert annotations is not None
        assert (annotations.read_only_hint, annotations.open_world_hint) == (True, False), name


@pytest.mark.parametrize("mode", MODES)
async def test_mesh_tools_answer_what_the_endpoints_of_the_commands_answer(mode: Any) -> None:
    async with mesh() as gateway, client_of(gateway, mode=mode) as client:

        async def read(path: str) -> Any:
            return await gateway.read(path, bearer(ANN))

        assert json.loads(await said(client, "explain", ONE)) == await read("/v1/requests/req-1")
        assert json.loads(await said(client, "requests")) == await read("/v1/requests?limit=20")
        assert json.loads(await said(client, "usage")) == await read("/v1/usage?by=model")
        quoted = json.loads(await said(client, "quote", {"model": "tiny", "prompt": "one two"}))
        assert (quoted["kind"], quoted["items"][0]["runner"]) == ("QuoteList", "a")


async def test_last_ended_request_is_explained_by_default() -> None:
    last = ended()
    last.tenant = "ann"
    requests = ScriptedRequests([last])
    async with mesh(requests=requests) as gateway, client_of(gateway) as client:
        assert json.loads(await said(client, "explain"))["requestId"] == "req-2"
        assert ("req-2", "ann") in requests.asked
        requests.records.clear()
        assert "no request has ended" in await refused(client, "explain")


async def test_ps_needs_the_scope_for_runners() -> None:
    async with mesh() as gateway, client_of(gateway) as client:
        assert await refused(client, "ps") == "the key lacks the scope runners:view (permission_denied)"


async def test_another_tenants_request_and_usage_are_not_visible() -> None:
    requests, usage = ScriptedRequests([waiting("req-1", "ann"), waiting("req-3", "bob")]), ScriptedUsage()
    async with mesh(requests=requests, usage_source=usage) as gateway:
        async with client_of(gateway, BOB) as client:
            assert "req-1" in await refused(client, "explain", ONE)
            assert [one["requestId"] for one in json.loads(await said(client, "requests"))["items"]] == ["req-3"]
            await said(client, "usage")
            assert "telemetry:view" in await refused(client, "usage", {"all_tenants": True})
        async with client_of(gateway, ADMIN) as client:
            await said(client, "usage", {"all_tenants": True})
            assert json.loads(await said(client, "requests", {"all_tenants": True}))["items"] == []
    assert requests.asked.pop() == (20, "ops")
    assert [wanted.tenant for wanted in usage.asked] == ["bob", ""]
    assert all(tenant == "bob" for _, tenant, *_ in requests.asked)


async def test_a_tool_says_which_argument_is_wrong_in_the_words_of_the_api() -> None:
    async with mesh() as gateway, client_of(gateway) as client:
        assert (
            await refused(client, "explain", {"request": "r"}) == "request: there is no such field (invalid_argument)"
        )
        assert "state: must be one of" in await refused(client, "requests", {"state": "lost"})
        assert "by: " in await refused(client, "usage", {"by": "colour"})
        assert "there is no tool weather" in await refused(client, "weather")


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("explain", {"request_id": "../admin/usage"}),
        ("explain", {"request_id": "req-1?allTenants=true"}),
        ("explain", {"request_id": "req-1/cancel"}),
        ("usage", {"model": "a&tenant=ann"}),
        ("usage", {"since": "30d&tenant=ann"}),
    ],
)
async def test_arguments_reach_no_other_endpoint_or_parameter(tool: str, arguments: Mapping[str, Any]) -> None:
    requests, usage = ScriptedRequests([waiting("req-1", "ann")]), ScriptedUsage()
    async with mesh(requests=requests, usage_source=usage) as gateway, client_of(gateway, BOB) as client:
        await refused(client, tool, arguments)
    assert usage.asked == []
    assert {tenant for _, tenant in requests.asked} <= {"bob"}


async def test_long_result_is_bounded_and_says_what_is_left_out() -> None:
    requests = ScriptedRequests([waiting(f"req-{number}", "ann") for number in range(300)])
    long = waiting("req-long", "ann")
    for number in range(400):
        long.decisions.add(kind=1, detail=f"{number} " + "it waits " * 40)
    requests.records.append(long)
    async with mesh(requests=requests) as gateway, client_of(gateway) as client:
        text = await said(client, "requests", {"limit": 300})
        found = json.loads(text)
        assert len(text.encode()) <= 32 * 1024
        assert 20 < len(found["items"]) < 300
        left = 300 - len(found["items"])
        assert found["more"] == f"left out: {left} of items; ask for fewer, or use the command of weft"
        text = await said(client, "explain", {"request_id": "req-long"})
        assert len(text.encode()) <= 32 * 1024
        assert " of decisions; ask for fewer" in json.loads(text)["more"]


async def test_callers_without_a_key_or_scope_get_nothing() -> None:
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    accept = {"Accept": "application/json, text/event-stream"}
    async with mesh() as gateway:
        for key, status in (("", 401), ("metrics00000", 403), (ANN, 200)):
            answer = await gateway.request("POST", "/mcp", call, accept, key=key)
            assert answer.status == status
        wrong = {"Authorization": f"{bearer(ANN)['Authorization'][:-1]}0"}
        answer = await gateway.request("POST", "/mcp", call, accept | wrong)
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
        for method in ("GET", "DELETE"):
            assert (await gateway.request(method, "/mcp", key=ANN)).status == 405


async def test_pages_of_other_origins_are_refused_as_at_every_path() -> None:
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    accept = {"Accept": "application/json"}
    config = GatewayConfig(port=0, cors=CorsConfig(allowed_origins=("https://app.example",)))
    async with serving(config=config) as gateway:
        for more, status in (
            ({"Origin": "https://evil.example"}, 403),
            ({"Host": "rebound.example"}, 403),
            ({"Origin": "https://app.example"}, 200),
        ):
            answer = await gateway.request("POST", "/mcp", call, accept | more)
            assert answer.status == status
        assert answer.headers["access-control-allow-origin"] == "https://app.example"


async def test_limits_of_bodies_and_queries_hold() -> None:
    config = GatewayConfig(port=0, max_body_bytes=2_000)
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    async with serving(config=config) as gateway:
        for path, body, status in (
            ("/mcp", call | {"params": {"a": "x" * 3_000}}, 413),
            ("/mcp?session=1", call, 400),
            ("/mcp", b"[" * 1_000, 400),
            ("/mcp", {"id": 1}, 400),
        ):
            answer = await gateway.request("POST", path, body, {"Accept": "application/json"})
            assert answer.status == status, body


async def test_path_is_documented_and_says_if_its_extension_is_off() -> None:
    async with mesh() as gateway:
        document = await gateway.read("/openapi.json", bearer(ANN))
        assert document["paths"]["/mcp"]["post"]["tags"] == ["mcp"]
    off = GatewayPorts(
        dispatcher=ScriptedDispatcher(),
        fleet=FixedFleet.of(model("tiny")),
        registry=ScriptedRegistry(),
        off_paths=off_paths(["mcp"]),
    )
    answer = await answer_of(app_of(GatewayConfig(), off), "POST", "/mcp")
    assert answer.status == 404
    assert b"the extension mcp is off: extensions.disabled names it" in answer.body


def test_gateway_loads_the_sdk_at_the_first_admitted_call_only() -> None:
    code = "import sys, weft_extensions.mcp.endpoint; print([name for name in sys.modules if name.startswith('mcp')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"[]\n"


class HangingRequests(ScriptedRequests):
    """A router that does not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.was_asked, self.was_cancelled = asyncio.Event(), asyncio.Event()

    async def request(self, request_id: str, tenant: str = "") -> Any:
        self.was_asked.set()
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            self.was_cancelled.set()


@pytest.mark.parametrize("mode", MODES)
async def test_call_ends_when_its_client_leaves(mode: Any) -> None:
    requests = HangingRequests()
    async with mesh(requests=requests) as gateway, client_of(gateway, mode=mode) as client:
        call = asyncio.create_task(client.call_tool("explain", ONE))
        await asyncio.wait_for(requests.was_asked.wait(), 5)
        call.cancel()
        if mode != "legacy":
            await asyncio.wait_for(requests.was_cancelled.wait(), 5)
    # A client of the older protocol ends a call with its connection: its notification is another message.
    await asyncio.wait_for(requests.was_cancelled.wait(), 5)


async def test_call_ends_at_its_deadline() -> None:
    requests = HangingRequests()
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "explain", "arguments": ONE}}
    async with mesh(requests=requests) as gateway:
        headers = {"Accept": "application/json", "X-Request-Timeout-Seconds": "0.2"}
        assert (await gateway.request("POST", "/mcp", call, headers, key=ANN)).status == 504
    assert requests.was_cancelled.is_set()
