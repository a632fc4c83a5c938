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
from kit.warm_python import IS_POSSIBLE, PROGRAMS, WarmPython, warm
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


async def test_it_is_a_child_of_the_process_that_started_it_with_one_thread_and_a_name_of_its_own() -> None:
    process = await _started(*FAKE)
    seen = psutil.Process(process.pid)
    assert seen.ppid() == os.getpid()
    assert seen.name() == Path(sys.executable).name
    assert process.pid not in {child.pid for child in _server().children()}
    assert len(_server().threads()) == 1
    process.kill()
    assert await _ended(process) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGABRT, -signal.SIGABRT)]
)
async def test_signals_reach_it_and_it_ends_as_any_process_does(number: signal.Signals, code: int) -> None:
    process = await _started(*FAKE)
    process.send_signal(number)
    assert await _ended(process) == code


async def test_an_interrupt_that_comes_before_it_runs_is_not_lost() -> None:
    process = await asyncio.create_subprocess_exec(*FAKE, stderr=asyncio.subprocess.PIPE)
    process.send_signal(signal.SIGINT)
    assert await _ended(process) in (-signal.SIGINT, 0)


@pytest.mark.parametrize("command", [["--version"], ["no-such-command"], ["ps", "--help"], ["ps"]])
def test_streams_and_exit_code_are_those_of_a_cold_start(command: list[str], tmp_path: Path) -> None:
    environment = {**os.environ, "WEFT_HOME": str(tmp_path), "COLUMNS": "90"}
    cold, forked = (
        subprocess.run([*start, *command], env=environment, cwd=tmp_path, capture_output=True, check=False)
        for start in ((sys.executable, *WEFT[1:]), WEFT)
    )
    assert (forked.returncode, forked.stdout, forked.stderr) == (cold.returncode, cold.stdout, cold.stderr)


def test_what_is_printed_goes_where_it_was_told_to_and_an_input_is_read(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as output:
        command = [*WEFT, "apply", "-f", "-", "--home", str(tmp_path)]
        done = subprocess.run(command, input=b"kind: [", stdout=output, stderr=subprocess.STDOUT, check=False)
    assert done.returncode != 0
    assert "Traceback" not in (tmp_path / "out").read_text()
    assert (tmp_path / "out").read_text()


async def test_it_has_the_folder_the_environment_and_the_session_that_it_was_given(tmp_path: Path) -> None:
    process = await _started(*FAKE, "--request-log", "requests", cwd=tmp_path, start_new_session=True)
    assert psutil.Process(process.pid).cwd() == str(tmp_path)
    assert os.getsid(process.pid) == process.pid != os.getsid(0)
    os.killpg(process.pid, signal.SIGKILL)
    await _ended(process)
    other = await _started(*FAKE)
    assert os.getsid(other.pid) == os.getsid(0)
    other.kill()
    await _ended(other)


async def test_its_command_line_is_its_own() -> None:
    process = await _started(*FAKE, "--answer-tokens", "5")
    assert psutil.Process(process.pid).cmdline() == [*FAKE, "--answer-tokens", "5"]
    process.kill()
    await _ended(process)


async def test_it_holds_no_file_of_the_server_nor_of_another_program() -> None:
    process = await _started(*FAKE)
    assert _open_files(_server().pid)
    assert _open_files(_server().pid).isdisjoint(_open_files(process.pid))
    process.kill()
    await _ended(process)


@pytest.mark.parametrize("command", [["-c", "print(1)"], ["-m", "this"], ["-S", "-c", "print(1)"]])
def test_what_is_none_of_its_programs_is_an_ordinary_python(command: list[str]) -> None:
    done = subprocess.run([WarmPython(sys.executable), *command], capture_output=True, text=True, check=True)
    assert done.stdout


def test_a_program_that_needs_more_than_a_fork_can_give_is_an_ordinary_python() -> None:
    done = subprocess.run(
        [*WEFT, "--version"], preexec_fn=lambda: os.nice(1), capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("weft ")


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


async def test_a_runner_of_a_mesh_is_forked_as_a_child_of_the_mesh_and_dies_with_it(tmp_path: Path) -> None:
    async with _mesh_of_one(tmp_path) as (mesh, server):
        runner = await _child(mesh, _is_forked_runner)
        assert os.getsid(runner.pid) == runner.pid
        assert _open_files(server.pid).isdisjoint(_open_files(runner.pid))
    _, alive = psutil.wait_procs([server, runner], timeout=SECONDS)
    assert alive == []


async def test_a_mesh_whose_server_is_gone_starts_its_runner_cold(tmp_path: Path) -> None:
    async with _mesh_of_one(tmp_path) as (mesh, server):
        server.kill()
        runner = await _child(mesh, _is_cold_runner)
        assert psutil.Process(runner.pid).ppid() == mesh.pid


def test_a_module_that_the_server_does_not_have_is_refused() -> None:
    with pytest.raises(AssertionError, match="not among the programs"):
        warm("json.tool")
    assert "json.tool" not in PROGRAMS


def test_the_server_ends_with_the_process_that_has_it() -> None:
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
