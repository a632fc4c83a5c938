"""A program that is forked from the warm server is a process like any other."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from kit.warm_python import IS_POSSIBLE, warm
from kit.warm_server import NAME

pytestmark = [
    pytest.mark.nightly("checks the tests' own tools"),
    pytest.mark.skipif(not IS_POSSIBLE, reason="a child of the same parent can be forked on Linux only"),
]
FAKE = (*warm("weft_testing.fake_backend"), "--port", "0")
WEFT = warm("weft_app.cli.main")
SECONDS = 30
TESTS = Path(__file__).parents[2]


def _server() -> psutil.Process:
    named = [child for child in psutil.Process().children() if child.name() == NAME]
    # Tests of runners have a server of that name, too.
    (server,) = [child for child in named if "kit.warm_server" in child.cmdline()]
    return server


async def _started(*command: str, **more: Any) -> asyncio.subprocess.Process:
    """A fake backend that listens."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, **more
    )
    assert process.stdout is not None
    async with asyncio.timeout(SECONDS):
        assert b"listening on" in await process.stdout.readline()
    return process


def _open_files(pid: int) -> set[str]:
    return {str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir() if int(file.name) > 2}


async def _ended(process: asyncio.subprocess.Process) -> int:
    async with asyncio.timeout(SECONDS):
        return await process.wait()


async def test_early_interrupt_is_not_lost() -> None:
    process = await asyncio.create_subprocess_exec(*FAKE, stderr=asyncio.subprocess.PIPE)
    process.send_signal(signal.SIGINT)
    assert await _ended(process) in (-signal.SIGINT, 0)


async def test_process_shares_no_open_file_with_the_server() -> None:
    process = await _started(*FAKE)
    assert _open_files(_server().pid)
    assert _open_files(_server().pid).isdisjoint(_open_files(process.pid))
    process.kill()
    await _ended(process)


@asynccontextmanager
async def _mesh_of_one(folder: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, psutil.Process]]:
    """A `weft up` with one runner, and the server that its runners are forked from."""
    config = folder / "weft.yaml"
    runner = {"name": "a", "command": [*FAKE], "models": [{"name": "m", "pool": "p", "path": __file__}]}
    config.write_text(json.dumps({"port": 0, "runners": [runner]}))
    with (folder / "out").open("wb") as output:
        command = [*WEFT, "up", "--home", str(folder / "home"), "--config", str(config)]
        mesh = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output)
    try:
        yield mesh, await _child(mesh, lambda child: child.name() == NAME)
    finally:
        if mesh.returncode is None:
            mesh.kill()
        await _ended(mesh)


async def _child(mesh: asyncio.subprocess.Process, is_it: Callable[[psutil.Process], bool]) -> psutil.Process:
    """The first child of a mesh that is of this kind."""
    async with asyncio.timeout(SECONDS):
        while True:
            for child in psutil.Process(mesh.pid).children():
                with suppress(psutil.Error):
                    if child.status() != psutil.STATUS_ZOMBIE and is_it(child):
                        return child
            await asyncio.sleep(0.01)


def _is_forked(process: psutil.Process) -> bool:
    """Whether what the kernel holds as its environment is the server's."""
    return process.environ().get("PYTHONPATH", "").startswith(str(TESTS))


def _is_forked_runner(child: psutil.Process) -> bool:
    return "serve" in child.cmdline() and _is_forked(child)


def _is_cold_runner(child: psutil.Process) -> bool:
    if _is_forked_runner(child):
        child.kill()
    return "serve" in child.cmdline() and not _is_forked(child)


async def test_runner_is_forked_as_a_child_of_the_mesh_and_dies_with_it(tmp_path: Path) -> None:
    async with _mesh_of_one(tmp_path) as (mesh, server):
        runner = await _child(mesh, _is_forked_runner)
        assert os.getsid(runner.pid) == runner.pid
        assert _open_files(server.pid).isdisjoint(_open_files(runner.pid))
    _, alive = psutil.wait_procs([server, runner], timeout=SECONDS)
    assert alive == []


async def test_mesh_without_its_server_starts_the_runner_cold(tmp_path: Path) -> None:
    async with _mesh_of_one(tmp_path) as (mesh, server):
        server.kill()
        runner = await _child(mesh, _is_cold_runner)
        assert psutil.Process(runner.pid).ppid() == mesh.pid


def test_server_exits_with_its_owner() -> None:
    program = (
        "import subprocess, psutil\n"
        "from kit.warm_python import warm\n"
        "subprocess.run([*warm('weft_app.cli.main'), '--version'], stdout=subprocess.DEVNULL, check=True)\n"
        "print(psutil.Process().children()[0].pid, flush=True)\n"
        "import os; os._exit(0)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(TESTS), str(TESTS.parent)))}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    server = int(done.stdout)
    psutil.wait_procs([psutil.Process(server)] if psutil.pid_exists(server) else [], timeout=SECONDS)
    assert not psutil.pid_exists(server) or psutil.Process(server).status() == psutil.STATUS_ZOMBIE
