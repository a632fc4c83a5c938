"""Backends that take long and backends that hang, seen from a client of the whole mesh."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from mesh_process import MeshProcess, eventually, fake_runner, running_mesh, write_config

LIMITS = {
    "prefill_liveness_timeout_seconds": 1.0,
    "idle_stream_timeout_seconds": 0.5,
}


@pytest.fixture(scope="module")
def shared_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    folder = tmp_path_factory.mktemp("stalls")
    gateway = {"sse_keepalive_seconds": 0.1}
    config = write_config(folder, fake_runner("a") | LIMITS, gateway=gateway)
    with running_mesh(folder / "home", "--config", str(config)) as mesh:
        yield mesh


@pytest.fixture
async def mesh(shared_mesh: MeshProcess) -> MeshProcess:
    await shared_mesh.reset("a")
    return shared_mesh


async def _stream(mesh: MeshProcess, **body: Any) -> list[str]:
    """The lines of a streamed answer that hold something."""
    chat = {"model": "m-a", "stream": True, "messages": [{"role": "user", "content": "a long prompt " * 200}], **body}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{mesh.url}/v1/chat/completions", json=chat, timeout=aiohttp.ClientTimeout(total=20.0)) as answer,
    ):
        assert answer.status == 200
        return [line for line in (await answer.text()).splitlines() if line]


def _errors(lines: list[str]) -> list[Any]:
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return [chunk["error"] for chunk in chunks if "error" in chunk]


@pytest.mark.parametrize("reports", [0, 6], ids=["silent", "with reports"])
async def test_a_prefill_longer_than_every_limit_is_not_ended_and_comments_flow(
    mesh: MeshProcess, reports: int
) -> None:
    before = (await mesh.describe("a")).restart_count
    async with await mesh.backend("a") as backend:
        await backend.set_behaviour(prefill_seconds=2.5, prefill_progress=reports)
    lines = await _stream(mesh)
    assert lines[-1] == "data: [DONE]"
    assert sum(line.startswith(":") for line in lines) >= 5
    assert sum(line.startswith(": prefill ") for line in lines) == reports
    assert (await mesh.describe("a")).restart_count == before


async def test_a_backend_that_freezes_in_mid_answer_is_named_restarted_and_serves_again(mesh: MeshProcess) -> None:
    before = await mesh.describe("a")
    async with await mesh.backend("a") as backend:
        await backend.set_behaviour(tokens_per_second=20, answer_tokens=0)
        sent = (await backend.state()).tokens_sent
        answer = asyncio.create_task(_stream(mesh))
        await backend.wait_for_state(lambda state: state.tokens_sent >= sent + 3)
        os.kill(before.process_id, signal.SIGSTOP)
    (error,) = _errors(await answer)
    assert error["code"] == "stall_timeout"
    assert "idle_stream_timeout_seconds" in error["message"]

    async def restarted() -> bool:
        now = await mesh.describe("a")
        return bool(now.last_ready_time.ToNanoseconds() > before.last_ready_time.ToNanoseconds())

    await eventually(restarted, 10.0, "the frozen backend was not replaced")
    assert (await _stream(mesh))[-1] == "data: [DONE]"
    assert "idle_stream_timeout_seconds" in (await mesh.describe("a")).last_restart_reason
