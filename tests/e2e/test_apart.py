"""The same services as processes of their own, and what the loss of one means to the others."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from apart_mesh import Apart, running_apart
from mesh_process import POOL, eventually, fake_runner, write_config


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
