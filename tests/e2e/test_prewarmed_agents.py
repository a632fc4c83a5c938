"""An agent's system prompt is in the real engine's cache before its first chat after a load."""

import asyncio
import json
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from filled_mesh import weft
from mesh_process import MeshProcess, running_mesh, write_config
from shallow_model import write_shallow_model

from weft_app.compose.demo import DEMO_MODEL, demo_runner_document

pytestmark = [pytest.mark.slow("a real engine"), pytest.mark.real]

RULES = " ".join(f"Rule {number}: a careful keeper writes down every ship that passes." for number in range(90))
WAIT_SECONDS = 30.0
MAX_NEW_TOKENS = 40


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    folder = tmp_path_factory.mktemp("prewarmed")
    (model,) = demo_runner_document()["models"]
    model["path"] = str(write_shallow_model(folder / "shallow.gguf"))
    tool = {"type": "python", "name": "new_id", "function": "weft.kernel.values.names:new_id"}
    agent = {"name": "keeper", "model": DEMO_MODEL, "system_prompt": RULES, "tools": ["new_id"]}
    config = write_config(folder, {"name": "local", "models": [model], "agents": [agent], "tools": [tool]})
    with running_mesh(folder / "home", "--config", str(config)) as mesh:
        yield mesh


def _post(mesh: MeshProcess, path: str, tenant: str, **body: Any) -> Any:
    headers = {"Content-Type": "application/json", "X-Tenant-ID": tenant}
    request = urllib.request.Request(mesh.url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def _chat(mesh: MeshProcess, tenant: str = "default") -> tuple[int, int]:
    """Prompt tokens of a chat with the agent, and how many of them were cached."""
    turn = [{"role": "user", "content": "How many words has this?"}]
    usage = _post(mesh, "/v1/chat/completions", tenant, model="agent/keeper", messages=turn, max_tokens=1)["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def _until_prewarmed(mesh: MeshProcess, tokens: int) -> int:
    """Waits until more than this number of tokens was prewarmed; returns the number."""
    deadline = time.monotonic() + WAIT_SECONDS
    while (found := asyncio.run(mesh.describe("local")).cache.prewarmed_token_count) <= tokens:
        assert time.monotonic() < deadline, "nothing was prewarmed"
    return found


def test_first_agent_chat_after_a_load_finds_its_system_prompt_cached(mesh: MeshProcess) -> None:
    warmed = _until_prewarmed(mesh, 0)
    prompt, cached = _chat(mesh)
    assert prompt > 1_000
    assert prompt - cached < MAX_NEW_TOKENS
    assert _chat(mesh, "team")[1] == 0, "another tenant's prompt was used"
    for action in ("unload", "load"):
        weft(mesh.home, action, DEMO_MODEL)
    # Both tenants have used the agent.
    _until_prewarmed(mesh, warmed + prompt)
    assert [prompt - _chat(mesh, tenant)[1] < MAX_NEW_TOKENS for tenant in ("default", "team")] == [True, True]
    assert _chat(mesh, "stranger")[1] == 0


def test_announced_beginning_is_cached_before_its_first_chat_after_a_load(mesh: MeshProcess) -> None:
    def ask(text: str, **fields: Any) -> Any:
        turns = [{"role": "system", "content": RULES.replace("Rule", "Order")}, {"role": "user", "content": text}]
        body = {"model": DEMO_MODEL, "messages": turns, "max_tokens": 1, **fields}
        return _post(mesh, "/v1/chat/completions", "announcer", **body)["usage"]

    ask("One?", prompt_cache_options={"ttl": "30m"})
    warmed = _until_prewarmed(mesh, 0)
    for action in ("unload", "load"):
        weft(mesh.home, action, DEMO_MODEL)
    _until_prewarmed(mesh, warmed)
    usage = ask("How many?")
    assert usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] < MAX_NEW_TOKENS
