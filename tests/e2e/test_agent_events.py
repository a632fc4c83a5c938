"""What agents ask for, in a whole mesh: published and declared, over HTTP and the command line."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from mesh_process import MeshProcess, fake_runner, running_mesh, write_config

DECISION = {"question": "Which shard?", "options": ["a", "b"]}
TURNS = [
    {"calls": [{"name": "desk_echo", "arguments": '{"text": "found it"}'}]},
    {"text": "Before I go on: ", "calls": [{"name": "NEEDS_MANAGER_DECISION", "arguments": json.dumps(DECISION)}]},
]
FAR_TURNS = [
    {"calls": [{"name": "far_echo", "arguments": '{"text": "found it"}'}]},
    {"text": "Done."},
]
DECLARED = """
kind: agent
name: declared
model: m-a
platformPrompt: true
tools: [desk.echo]
signals: [LOW_CONFIDENCE, NEEDS_MANAGER_DECISION]
"""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    """A runner with a tool, whose model first calls it and then asks for a decision, and one whose tools are remote.

    A third one, in the pool of the first, lacks the tool: what it is asked for goes to the first.
    """
    folder = tmp_path_factory.mktemp("agents")
    argv = [sys.executable, "-m", "weft_testing.fake_mcp_server", "--bare"]
    desk = {"type": "mcp_command", "name": "desk", "argv": argv}
    asking = {"platform_prompt": True, "tools": ["desk.echo"], "signals": ["LOW_CONFIDENCE", "NEEDS_MANAGER_DECISION"]}
    runner = {
        **fake_runner("a", turns=TURNS),
        "tools": [desk],
        "agents": [{"name": "published", "model": "m-a", **asking}],
    }
    far_runner = {
        **fake_runner("b", pool="far-pool", turns=FAR_TURNS),
        "tools": [{**desk, "name": "far", "remote": True}],
        "agents": [{"name": "away", "model": "m-b", "tools": ["far.echo"]}],
    }
    config = write_config(folder, runner, far_runner, fake_runner("c", turns=TURNS))
    with running_mesh(folder / "home", "--config", str(config)) as mesh:
        yield mesh


async def ask(mesh: MeshProcess, agent: str, **fields: Any) -> str:
    body = {"model": f"agent/{agent}", "messages": [{"role": "user", "content": "Delete a shard"}], **fields}
    async with aiohttp.ClientSession() as session, session.post(f"{mesh.url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.text()


@pytest.mark.parametrize("agent", ["published", "declared"])
async def test_agent_runs_its_tool_and_requests_approval(mesh: MeshProcess, agent: str) -> None:
    await mesh.weft("apply", "-f", "-", stdin=DECLARED)
    whole = json.loads(await ask(mesh, agent, unheard_of=1))
    assert whole["signals"] == [{"name": "NEEDS_MANAGER_DECISION", "arguments": DECISION}]
    assert [warning["field"] for warning in whole["warnings"]] == ["unheard_of"]
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["choices"][0]["message"]["content"] == "Before I go on: "
    assert "tool_calls" not in whole["choices"][0]["message"]
    assert mesh.log_lines("request")[-1]["runner"] == "a"
    stream = await ask(mesh, agent, stream=True, stream_options={"include_weft_events": True})
    chunks = [json.loads(part[6:]) for part in stream.split("\n\n") if part.startswith("data: {")]
    told = [chunk["weft"] for chunk in chunks if "weft" in chunk]
    assert [next(iter(each)) for each in told] == ["tool_call", "tool_result", "signal"]
    assert (told[0]["tool_call"]["name"], told[0]["tool_call"]["arguments"]) == ("desk.echo", {"text": "found it"})
    assert (told[1]["tool_result"]["failed"], "found it" in told[1]["tool_result"]["content"]) == (False, True)


async def test_remote_tools_require_allow_remote_and_are_reported(mesh: MeshProcess) -> None:
    body = {"model": "agent/away", "messages": [{"role": "user", "content": "Find it"}]}
    url = f"{mesh.url}/v1/chat/completions"
    async with aiohttp.ClientSession() as session:
        async with session.post(url, json=body) as refused:
            assert refused.status == 403
            assert (await refused.json())["error"]["code"] == "permission_denied"
        async with session.post(url, json={**body, "allow_remote": True}) as answer:
            assert (answer.status, answer.headers["x-left-premises"]) == (200, "true")
            assert (await answer.json())["choices"][0]["message"]["content"] == "Done."
        async with session.post(url, json={**body, "model": "m-b"}) as answer:
            assert (answer.status, answer.headers["x-left-premises"]) == (200, "false")
