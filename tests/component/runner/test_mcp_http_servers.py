"""Tools of real MCP servers over streamable HTTP."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from kit.failures import fails
from kit.http_server import http_server

from runner_svc.tools.port import ToolSettings
from runner_svc.tools.tool_box import ToolBox, build_tool_box
from weft.kernel.errors.reasons import Reason


@asynccontextmanager
async def server() -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "weft_testing.fake_mcp_server", "--http"), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        port = int((await process.stdout.readline()).split()[1])
        yield process, f"http://127.0.0.1:{port}/mcp"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[ToolBox]:
    config = ToolSettings(
        type="mcp_http",
        name="fake",
        url=url,
        headers={"Authorization": "Bearer hush"},
        max_output_bytes=1000,
    )
    box = build_tool_box([config])
    try:
        await box.start()
        yield box
    finally:
        await box.stop()


@pytest.mark.slow("starts a server on the SDK")
async def test_http_server_receives_headers_and_may_hang_flood_or_die() -> None:
    async with server() as (process, url), connected(url) as box:
        assert (await box.run("fake.echo", {"text": "hé"})).content == "hé"
        assert "'authorization': 'Bearer hush'" in (await box.run("fake.headers", {})).content
        assert (await box.run("fake.huge", {"bytes": 2000})).cut

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(box.run("fake.slow", {}), 0.1)
        assert (await box.run("fake.echo", {"text": "after"})).content == "after"

        flood = await box.run("fake.huge", {"bytes": 5_000_000})
        assert flood.failed
        assert (await box.run("fake.echo", {"text": "again"})).content == "again"

        crash = await box.run("fake.crash", {})
        assert crash.failed
        await process.wait()
        gone = await box.run("fake.echo", {"text": "anyone?"})
        assert gone.failed
        with fails(Reason.TOOL_UNAVAILABLE) as caught:
            box.pick(["fake.echo"])
        assert "127.0.0.1" not in caught.value.message
        assert "hush" not in caught.value.message
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


async def test_missing_server_does_not_prevent_runner_startup() -> None:
    async with connected("http://127.0.0.1:9/mcp") as box:
        with fails(Reason.TOOL_UNAVAILABLE, match="its server cannot be reached"):
            box.pick(["fake.echo"])


async def test_redirected_call_is_not_followed_and_its_address_not_revealed() -> None:
    results = {
        "initialize": {
            "protocolVersion": "2025-06-18",
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "mover", "version": "1"},
        },
        "tools/list": {"tools": [{"name": "echo", "inputSchema": {"type": "object"}}]},
    }
    visits: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        message = await request.json() if request.method == "POST" else {}
        visits.append(request.path)
        if message.get("method") == "tools/call":
            return web.Response(
                status=307, headers={"Location": f"http://localhost:{request.url.port}/stolen?token=hush"}
            )
        if message.get("method") not in results:
            return web.Response(status=202 if "method" in message else 405)
        return web.json_response({"jsonrpc": "2.0", "id": message["id"], "result": results[message["method"]]})

    async with http_server(handle) as url, connected(f"{url}/mcp") as box:
        outcome = await box.run("fake.echo", {})
        port = url.rpartition(":")[2]
    assert outcome.failed
    assert "Redirect to [an address]" in outcome.content
    assert not {"localhost", "hush", port} & set(outcome.content.replace("/", " ").split())
    assert set(visits) == {"/mcp"}


@pytest.mark.parametrize("kind", ["endless", "compressed", "refused", "elsewhere", "nonsense"])
async def test_http_server_without_mcp_is_unavailable_and_harmless(kind: str) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        if kind == "refused":
            return web.Response(status=401, text="who are you?")
        if kind == "elsewhere":
            return web.Response(status=307, headers={"Location": "http://127.0.0.2:9/secret"})
        if kind == "nonsense":
            return web.json_response({"hello": "world"})
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        if kind == "compressed":
            response.headers["Content-Encoding"] = "gzip"
        await response.prepare(request)
        for _ in range(8):
            await response.write(b" " * 1024 * 1024)
        return response

    async with http_server(handle) as url, connected(f"{url}/mcp") as box:
        with fails(Reason.TOOL_UNAVAILABLE) as caught:
            box.pick(["fake.echo"])
        assert url.rpartition(":")[2] not in caught.value.message
