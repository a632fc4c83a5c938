"""Tools of MCP servers at `/mcp`: found by search, called by keys that may name a tool, and recorded as requests."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from gateway_script import FixedFleet, RunningGateway, model
from kit.keys import Keys
from mcp.client import Client
from structlog.testing import capture_logs
from test_mesh_tools import MODES, client_of, mesh, refused, said

from gateway.gateway_config import GatewayConfig, RateLimitConfig
from gateway.server_tools.permission import RemoteRules
from runner_svc.runner_settings import RunnerSettings
from runner_svc.tools.port import ToolDescription, ToolOutcome, ToolSettings
from runner_svc.tools.tool_box import ToolBox
from weft.api.common.v1 import receipt_pb2
from weft.api.registry.v1.tenant_pb2 import REMOTE_PERMISSION_ALWAYS, REMOTE_PERMISSION_NEVER
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.placement_request import PlacementRequest
from weft.kernel.values.units import Rate
from weft_app.compose.gateway_tools import GatewayTools

KEYS = Keys(
    {
        "author000000": ("models:edit", "inference:create", "remote:create"),
        "stays0000000": ("models:edit", "inference:create"),
        "named0000000": ("models/team-*:edit", "inference:create"),
        "user00000000": ("inference:create", "inference:edit", "models:view"),
    }
)
AUTHOR, STAYS, NAMED, USER = "author000000", "stays0000000", "named0000000", "user00000000"
TEXT: Mapping[str, Any] = {
    "type": "object",
    "properties": {"text": {"type": "string"}},
    "required": ["text"],
    "additionalProperties": False,
}


@dataclass
class Notes:
    """An MCP server with tools that answer by their names."""

    settings: ToolSettings
    texts: Mapping[str, str]
    calls: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    was_asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def why_missing(self, name: str) -> str:
        return f"there is no {name}"

    def descriptions(self) -> Sequence[ToolDescription]:
        return [ToolDescription(name=name, description=text, parameters=TEXT) for name, text in self.texts.items()]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolOutcome:
        self.calls.append((name, arguments))
        self.was_asked.set()
        if name == "notes.hang":
            await asyncio.get_running_loop().create_future()
        if name == "notes.fail":
            raise WeftError(Reason.TOOL_UNAVAILABLE, "the disk is full")
        return ToolOutcome(content=f"{name} got {arguments['text']}")


class Servers(GatewayTools):
    """The servers `notes` and, whose calls leave the mesh, `web`, of the runner `main`."""

    def __init__(self) -> None:
        notes = ToolSettings(type="mcp_command", name="notes", argv=("x",))
        words = ("search", "Finds notes by their words."), ("write", "Writes a note."), ("hang", "."), ("fail", ".")
        self.notes = Notes(notes, {f"notes.{name}": text for name, text in words})
        self.web = Notes(
            replace(notes, name="web", remote=True), {"web.search": "Searches the web for pages, not notes."}
        )
        self.connected = 0

    def servers(self) -> Mapping[str, RunnerSettings]:
        runner = RunnerSettings(name="main", runtime="x", models=(), tools=(self.notes.settings, self.web.settings))
        return {"main/notes": runner, "main/web": runner}

    async def boxes(self) -> Mapping[str, ToolBox]:
        self.connected += 1
        return {"main/notes": ToolBox([self.notes]), "main/web": ToolBox([self.web])}


@dataclass
class Ends:
    """Records what is reported."""

    sent: list[tuple[PlacementRequest, receipt_pb2.Receipt]] = field(default_factory=list)
    on_fate: Any = None

    def send(self, request: PlacementRequest, receipt: receipt_pb2.Receipt, _arrived_at: float) -> None:
        self.sent.append((request, receipt))

    async def stop(self, _grace_seconds: float) -> None: ...


@dataclass
class Stage:
    gateway: RunningGateway
    servers: Servers
    ends: Ends


@asynccontextmanager
async def stage(**ports: Any) -> AsyncIterator[Stage]:
    servers, ends = Servers(), Ends()
    given: dict[str, Any] = {
        "keys": KEYS,
        "fleet": FixedFleet.of(model("tiny"), revision=1),
        "tool_calls": servers,
        "ends": ends,
    }
    async with mesh(**(given | ports)) as gateway:
        yield Stage(gateway, servers, ends)


async def names(client: Client, query: str, limit: int = 5) -> list[str]:
    found = json.loads(await said(client, "search_tools", {"query": query, "limit": limit}))
    return [each["name"] for each in found["items"]]


@pytest.mark.parametrize("mode", MODES)
async def test_tools_are_found_by_search_and_called(mode: Any) -> None:
    async with stage() as on, client_of(on.gateway, AUTHOR, mode) as client:
        listed = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert "notes" not in "".join(tool.model_dump_json() for tool in listed.values())
        hints = listed["call_tool"].annotations
        assert hints is not None
        assert (hints.read_only_hint, hints.destructive_hint, hints.open_world_hint) == (False, True, True)
        assert on.servers.connected == 0
        assert await names(client, "search my notes", 3) == ["main/notes.search", "main/web.search", "main/notes.fail"]
        assert await names(client, "Search the web", 1) == ["main/web.search"]
        assert await names(client, "weather") == []
        found = json.loads(await said(client, "search_tools", {"query": "write", "limit": 1}))
        assert (found["total"], found["items"][0]["inputSchema"]) == (1, TEXT)
        called = {"name": "main/notes.write", "arguments": {"text": "hello"}}
        assert await said(client, "call_tool", called) == "notes.write got hello"
    assert on.servers.notes.calls == [("notes.write", {"text": "hello"})]


async def test_call_is_recorded_as_a_request_of_the_tenant_and_key() -> None:
    called = {"name": "main/web.search", "arguments": {"text": "hello"}}
    async with stage() as on, client_of(on.gateway, AUTHOR) as client:
        await said(client, "call_tool", called)
        await said(client, "call_tool", called)
    (request, receipt), (second, _) = on.ends.sent
    assert (request.tenant, request.model, request.caller) == ("ann", "main/web.search", f"key:{AUTHOR}")
    assert request.request_id != second.request_id
    assert (receipt.outcome, receipt.model, receipt.left_premises) == (
        receipt_pb2.OUTCOME_COMPLETED,
        "main/web.search",
        True,
    )
    assert [(run.tool, run.failed) for run in receipt.tool_runs] == [("main/web.search", False)]
    assert [(attempt.runner, attempt.model) for attempt in receipt.attempts] == [("main", "main/web.search")]


async def test_only_keys_that_may_name_a_tool_see_and_call_one() -> None:
    called = {"name": "main/notes.write", "arguments": {"text": "hello"}}
    async with stage() as on:
        for key in (USER, NAMED):
            async with client_of(on.gateway, key) as client:
                assert {tool.name for tool in (await client.list_tools()).tools}.isdisjoint(
                    {"search_tools", "call_tool"}
                )
                for name, arguments in (("search_tools", {"query": "notes"}), ("call_tool", called)):
                    assert "lacks the scope models:edit" in await refused(client, name, arguments)
        assert (on.servers.connected, on.servers.notes.calls) == (0, [])


@pytest.mark.parametrize(
    ("key", "rules", "may"),
    [
        (AUTHOR, RemoteRules(), True),
        (STAYS, RemoteRules(), False),
        (STAYS, RemoteRules(tenants={"ann": REMOTE_PERMISSION_ALWAYS}), True),
        (AUTHOR, RemoteRules(tenants={"ann": REMOTE_PERMISSION_NEVER}), False),
    ],
)
async def test_tool_that_leaves_the_mesh_needs_the_permission_for_remote(
    key: str, rules: RemoteRules, *, may: bool
) -> None:
    called = {"name": "main/web.search", "arguments": {"text": "hello"}}
    async with stage(remote_rules=rules) as on, client_of(on.gateway, key) as client:
        assert ("main/web.search" in await names(client, "web")) is may
        if not may:
            assert "main/web.search" in await refused(client, "call_tool", called)
        assert on.servers.web.calls == []
        assert await names(client, "notes", 1) == ["main/notes.search"]


async def test_failed_invalid_and_unknown_calls_are_results_with_an_error() -> None:
    async with stage() as on, client_of(on.gateway, AUTHOR) as client:

        async def call(name: str, arguments: object) -> str:
            return await refused(client, "call_tool", {"name": name, "arguments": arguments})

        assert await call("main/notes.fail", {"text": "a"}) == "The tool failed: the disk is full (tool_failed)"
        assert "tool_call_invalid" in await call("main/notes.write", {"txt": "a"})
        assert "there is no tool main/notes.wite" in await call("main/notes.wite", {})
        assert "arguments" in await call("main/notes.write", [])
    assert [(receipt.outcome, receipt.tool_runs[0].failed) for _, receipt in on.ends.sent] == [
        (receipt_pb2.OUTCOME_COMPLETED, True)
    ]


async def test_call_whose_client_leaves_is_cancelled_and_recorded_as_such() -> None:
    async with stage() as on, client_of(on.gateway, AUTHOR) as client:
        called = {"name": "main/notes.hang", "arguments": {"text": "a"}}
        call = asyncio.create_task(client.call_tool("call_tool", called))
        await asyncio.wait_for(on.servers.notes.was_asked.wait(), 5)
        call.cancel()
        async with asyncio.timeout(5):
            while not on.ends.sent:  # noqa: ASYNC110 - the record has no event
                await asyncio.sleep(0.01)
    ((_, receipt),) = on.ends.sent
    assert (receipt.outcome, receipt.reason) == (receipt_pb2.OUTCOME_CANCELLED, Reason.CANCELLED.value)


async def test_calls_count_against_the_limit_of_the_tenant() -> None:
    called = {"name": "main/notes.write", "arguments": {"text": "hello"}}
    config = GatewayConfig(port=0, rate_limits=RateLimitConfig(default=Rate(1, 60)))
    async with stage(config=config) as on, client_of(on.gateway, AUTHOR) as client:
        await said(client, "call_tool", called)
        assert "rate_limit" in await refused(client, "call_tool", called)
    assert len(on.servers.notes.calls) == 1


class Broken(Servers):
    """Fails with a word that no caller may see."""

    async def boxes(self) -> Mapping[str, ToolBox]:
        raise KeyError("hidden")


@pytest.mark.parametrize("mode", MODES)
async def test_fault_of_weft_is_logged_and_not_shown(mode: Any) -> None:
    with capture_logs() as logged:
        async with stage(tool_calls=Broken()) as on, client_of(on.gateway, AUTHOR, mode) as client:
            said_words = await refused(client, "search_tools", {"query": "notes"})
    assert said_words.startswith("an internal error")
    assert "tool of the MCP server failed" in [each["event"] for each in logged]


async def test_server_without_its_variable_is_named_and_hinders_no_other_tool() -> None:
    source = ToolSettings(type="mcp_http", name="a", url="http://127.0.0.1:9/", headers={"A": "${WEFT_TOOL_MISSING}"})
    section = RunnerSettings(name="main", runtime="x", models=(), tools=(source,))
    async with stage(tool_calls=GatewayTools(lambda: [section])) as on, client_of(on.gateway, AUTHOR) as client:
        assert len((await client.list_tools()).tools) == 7
        assert "runners.main.tools.a.headers" in await refused(client, "search_tools", {"query": "notes"})
        await said(client, "requests")


async def test_mesh_without_servers_lists_no_tools_for_them() -> None:
    async with mesh(keys=KEYS) as gateway, client_of(gateway, AUTHOR) as client:
        assert len((await client.list_tools()).tools) == 5
        assert json.loads(await said(client, "search_tools", {"query": "notes"}))["items"] == []
