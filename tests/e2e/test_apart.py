"""The same services as processes of their own, and what the loss of one means to the others."""

import asyncio
import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from apart_mesh import Apart, running_apart
from mesh_process import POOL, eventually, fake_runner, run_weft, write_config


@contextmanager
def _apart(folder: Path, **switches: Any) -> Iterator[Apart]:
    with running_apart(folder, write_config(folder, fake_runner("a", **switches))) as mesh:
        yield mesh


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Apart]:
    with _apart(tmp_path, answer_tokens=0, tokens_per_second=20) as mesh:
        yield mesh


async def _ready(http: aiohttp.ClientSession, mesh: Apart) -> None:
    async def healthy() -> bool:
        async with http.get(f"{mesh.url}/health") as response:
            return response.status == 200

    await eventually(healthy, 10.0, "the gateway does not become healthy")


async def _stream(http: aiohttp.ClientSession, mesh: Apart, tokens: int, started: asyncio.Event) -> list[str]:
    body = {
        "model": POOL,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": tokens,
        "stream": True,
    }
    lines: list[str] = []
    async with http.post(f"{mesh.url}/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data:"):
                lines.append(line[5:].strip().decode())
                started.set()
    return lines


def _tokens(lines: list[str]) -> int:
    texts = [
        choice["delta"].get("content") or ""
        for line in lines
        if line != "[DONE]"
        for choice in json.loads(line).get("choices", ())
    ]
    return "".join(texts).count("tok")


async def test_services_in_separate_processes_serve_a_request(mesh: Apart) -> None:
    async with aiohttp.ClientSession() as http:
        await _ready(http, mesh)
        lines = await _stream(http, mesh, 5, asyncio.Event())
    assert lines[-1] == "[DONE]"
    assert _tokens(lines) == 5


async def test_requests_are_served_without_the_registry_and_the_runner_reregisters_after_its_restart(
    mesh: Apart,
) -> None:
    async with aiohttp.ClientSession() as http:
        await _ready(http, mesh)
        # The mesh must know that the model is ready: while the registry is away a runner cannot report it.
        assert (await _stream(http, mesh, 5, asyncio.Event()))[-1] == "[DONE]"
        mesh.end("registry", signal.SIGKILL)
        assert (await _stream(http, mesh, 5, asyncio.Event()))[-1] == "[DONE]"
        await asyncio.to_thread(mesh.start, "registry")
        await _ready(http, mesh)
        assert (await _stream(http, mesh, 5, asyncio.Event()))[-1] == "[DONE]"


@pytest.mark.nightly("services apart, replaced in the redesign")
async def test_cli_finds_services_of_a_home_without_weft_up(mesh: Apart) -> None:
    async with aiohttp.ClientSession() as http:
        await _ready(http, mesh)
    code, out, error = await run_weft("get", "runners", "-o", "json", home=mesh.home)
    assert code == 0, error
    assert [runner["name"] for runner in json.loads(out)["items"]] == ["a"]
    code, out, error = await run_weft("chat", POOL, "-m", "hi", "--max-tokens", "3", home=mesh.home)
    assert (code, out.split()) == (0, ["tok0", "tok1", "tok2"]), error


@pytest.mark.nightly("services apart, replaced in the redesign")
async def test_new_router_without_stream_state_queues_requests_until_slots_are_free(
    tmp_path: Path,
) -> None:
    with _apart(tmp_path, slots=1, answer_tokens=0, tokens_per_second=20) as mesh:
        async with aiohttp.ClientSession() as http:
            await _ready(http, mesh)
            started = asyncio.Event()
            streaming = asyncio.create_task(_stream(http, mesh, 100, started))
            await started.wait()
            mesh.end("router", signal.SIGKILL)
            await asyncio.to_thread(mesh.start, "router")
            second = await _stream(http, mesh, 3, asyncio.Event())
            first = await streaming
    assert (_tokens(first), _tokens(second)) == (100, 3)
    assert (first[-1], second[-1]) == ("[DONE]", "[DONE]")
