"""The MCP server of a whole mesh: its tools say what the commands of their names print."""

import json
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from mcp.client import Client
from mesh_process import eventually, fake_runner, running_mesh, write_config
from test_mesh_tools import refused, said

pytestmark = pytest.mark.slow("a whole mesh")
CHAT = {"model": "m-a", "max_tokens": 3, "messages": [{"role": "user", "content": "hello"}]}


async def test_tools_print_what_the_commands_print(tmp_path: Path) -> None:
    config = write_config(tmp_path, fake_runner("a"))
    with running_mesh(tmp_path / "home", "--config", str(config)) as mesh:
        async with aiohttp.ClientSession(mesh.url) as http, http.post("/v1/chat/completions", json=CHAT) as answer:
            assert answer.status == 200, await answer.text()
            request_id = answer.headers["x-request-id"]
        async with Client(f"{mesh.url}/mcp") as client:

            async def explained() -> Any:
                found = json.loads(await said(client, "explain"))
                return found if found.get("receipt") else None

            found = await eventually(explained, 5.0, "the request is not recorded")
            assert found["requestId"] == request_id
            assert found == json.loads(await mesh.weft("explain", request_id, "-o", "json"))
            ended = json.loads(await said(client, "requests", {"state": "ended"}))
            assert ended == json.loads(await mesh.weft("get", "requests", "--state", "ended", "-o", "json"))
            shown, printed = json.loads(await said(client, "ps")), json.loads(await mesh.weft("ps", "-o", "json"))
            for rows in (shown["items"], printed["items"]):
                for row in rows:
                    del row["until"]
            assert shown == printed
            used, printed = await said(client, "usage"), await mesh.weft("mesh", "usage", "--by", "model", "-o", "json")
            assert json.loads(used)["items"] == json.loads(printed)["items"]


async def test_tool_of_a_configured_server_is_called_and_recorded(tmp_path: Path) -> None:
    server = {
        "type": "mcp_command",
        "name": "fake",
        "argv": [sys.executable, "-m", "weft_testing.fake_mcp_server"],
        "environment": {"PYTHONPATH": ":".join(sys.path)},
    }
    config = write_config(tmp_path, fake_runner("a") | {"tools": [server]})
    with running_mesh(tmp_path / "home", "--config", str(config)) as mesh:
        async with Client(f"{mesh.url}/mcp") as client:
            found = json.loads(await said(client, "search_tools", {"query": "echo"}))["items"]
            assert [each["name"] for each in found] == ["a/fake.echo"]
            assert await said(client, "call_tool", {"name": "a/fake.echo", "arguments": {"text": "hello"}}) == "hello"
            assert "The disk is full." in await refused(client, "call_tool", {"name": "a/fake.fail"})

            async def recorded() -> Any:
                items = json.loads(await said(client, "requests", {"state": "completed"}))["items"]
                return items if len(items) == 2 else None

            records = await eventually(recorded, 5.0, "the calls are not recorded")
            assert [each["target"] for each in records] == ["a/fake.fail", "a/fake.echo"]
        explained = await mesh.weft("explain", records[0]["requestId"])
        assert "a/fake.fail on a" in explained
        used = json.loads(await mesh.weft("mesh", "usage", "--by", "model", "-o", "json"))
        assert {row["model"]: row["completed"] for row in used["items"]} == {"a/fake.echo": 1, "a/fake.fail": 1}
