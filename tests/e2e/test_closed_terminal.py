"""A terminal closes under a mesh: streams end in order, and writes to what is gone end nothing."""

import asyncio
import json
import os
import pty
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from mesh_process import (
    COLD_WEFT,
    STOP_SECONDS,
    WEFT,
    MeshProcess,
    alive,
    fake_runner,
    running_mesh,
    user_environment,
    wait_until_ready,
    write_config,
)

SLOW: dict[str, Any] = {"answer_tokens": 30, "tokens_per_second": 20}
"""An answer that goes on for a moment after the terminal has closed."""


@contextmanager
def mesh_on_a_terminal(folder: Path, *arguments: str) -> Iterator[tuple[MeshProcess, int]]:
    """`weft up` in the foreground of a terminal of its own, and that terminal's other end."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", *COLD_WEFT, "up", "--home", str(folder / "home"), *arguments],
        env={**user_environment(), "TERM": "dumb"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    (folder / "home.out").write_text("it is on a terminal")
    mesh = MeshProcess(folder / "home", process)
    try:
        wait_until_ready(mesh)
        family = mesh.family()
        yield mesh, ours
        assert process.wait(STOP_SECONDS) == 0
        assert not alive(family), "weft up left processes behind"
    finally:
        for left in mesh.family():
            with suppress(psutil.NoSuchProcess):
                left.kill()
        process.wait(STOP_SECONDS)


async def _first_content(response: aiohttp.ClientResponse) -> None:
    async for line in response.content:
        if b'"content":"' in line:
            return


async def _rest(response: aiohttp.ClientResponse) -> list[Any]:
    """The data events that are left; the connection must end in order."""
    heard: list[Any] = []
    async for line in response.content:
        if line.startswith(b"data:"):
            data = line[5:].strip()
            heard.append("[DONE]" if data == b"[DONE]" else json.loads(data))
    return heard


@asynccontextmanager
async def _stream(mesh: MeshProcess) -> AsyncIterator[aiohttp.ClientResponse]:
    body = {"model": "m-a", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1000, "stream": True}
    async with aiohttp.ClientSession() as http, http.post(f"{mesh.url}/v1/chat/completions", json=body) as response:
        assert response.status == 200
        yield response


async def _configure(mesh: MeshProcess, **switches: Any) -> None:
    async with await mesh.backend("a") as backend:
        await backend.set_behaviour(**switches)


async def test_stream_runs_to_its_end_when_the_terminal_closes(tmp_path: Path) -> None:
    """SIGHUP ended the host in the middle of the stream; then a write to the dead terminal did."""
    config = write_config(tmp_path, fake_runner("a"))
    with mesh_on_a_terminal(tmp_path, "--verbose", "--config", str(config)) as (mesh, terminal):
        await _configure(mesh, **SLOW)
        async with _stream(mesh) as response:
            await _first_content(response)
            os.close(terminal)
            # As a shell does on its way out, once more: that is not the second signal of somebody in a hurry.
            for _ in range(3):
                mesh.process.send_signal(signal.SIGHUP)
            heard = await _rest(response)
        assert heard[-1] == "[DONE]"
        assert [event["choices"][0]["finish_reason"] for event in heard[:-1] if event["choices"]][-1] == "stop"


@pytest.mark.nightly("more ways in which a terminal closes")
async def test_mesh_under_nohup_survives_a_hangup(tmp_path: Path) -> None:
    config = write_config(tmp_path, fake_runner("a"))
    with running_mesh(tmp_path / "home", "--config", str(config), within=("nohup",)) as mesh:
        # Runners have sessions of their own, which no terminal hangs up.
        mesh.process.send_signal(signal.SIGHUP)
        async with _stream(mesh) as response:
            assert (await _rest(response))[-1] == "[DONE]"
        assert mesh.process.poll() is None


@pytest.mark.parametrize(
    "service",
    [
        "registry",
        *(pytest.param(name, marks=pytest.mark.nightly("another service")) for name in ("router", "gateway", "runner")),
    ],
)
async def test_service_drains_on_sighup_as_on_sigterm(tmp_path: Path, service: str) -> None:
    config = write_config(tmp_path, fake_runner("a"))
    process = await asyncio.create_subprocess_exec(
        *(*WEFT, "serve", service, "--home", str(tmp_path / "home"), "--config", str(config)),
        env=user_environment(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(STOP_SECONDS):
            assert b"serves at" in await process.stdout.readline()
            process.send_signal(signal.SIGHUP)
            assert await process.wait() == 0
            assert await process.stdout.read() == b""
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
