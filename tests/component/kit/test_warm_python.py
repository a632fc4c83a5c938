"""A program that is forked from the warm server is a process like any other."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from kit.warm_python import IS_POSSIBLE, PROGRAMS, WarmPython, warm
from kit.warm_server import NAME

pytestmark = pytest.mark.skipif(not IS_POSSIBLE, reason="a child of the same parent can be forked on Linux only")
FAKE = (*warm("weft_testing.fake_backend"), "--port", "0")
WEFT = warm("weft_app.cli.main")
SECONDS = 30


def _server() -> psutil.Process:
    (server,) = [child for child in psutil.Process().children() if child.name() == NAME]
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
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(root), str(root.parent)))}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    server = int(done.stdout)
    psutil.wait_procs([psutil.Process(server)] if psutil.pid_exists(server) else [], timeout=SECONDS)
    assert not psutil.pid_exists(server) or psutil.Process(server).status() == psutil.STATUS_ZOMBIE
