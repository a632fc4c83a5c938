"""Small files of a home are damaged, and background tasks die: it heals, or a process ends and says why."""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chats import chat
from mesh_process import WEFT, MeshProcess, eventually, fake_runner, running_mesh, user_environment, write_config

DYING_TASK = str(Path(__file__).with_name("dying_task.py"))
BACK_SECONDS = 60.0
"""Far less than the 90 s after which the registry takes a runner that it does not hear of for gone."""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    folder = tmp_path_factory.mktemp("damaged")
    with running_mesh(folder / "home", "--config", str(write_config(folder, fake_runner("a")))) as mesh:
        yield mesh


def _garbage(path: Path) -> None:
    path.write_bytes(os.urandom(100))


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:7])


def _folder(path: Path) -> None:
    """Neither readable nor writable as a file, also for root."""
    path.unlink()
    (path / "in the way").mkdir(parents=True)


@pytest.mark.parametrize(
    "damage",
    [
        _garbage,
        *(
            pytest.param(damage, marks=pytest.mark.nightly("a matrix of damages"))
            for damage in (_empty, _truncated, _folder)
        ),
    ],
)
async def test_runner_killed_with_a_damaged_session_file_recovers_and_callers_get_no_401(
    mesh: MeshProcess, damage: Callable[[Path], None]
) -> None:
    """It lived on unregistered for 90 s and more, and callers were told that they were not authenticated."""
    state = mesh.home / "state" / "runners"
    assert (await chat(mesh.url, max_tokens=2))[0] == 200
    damage(state / "a.session")
    (runner,) = await mesh.runners()
    process = next(each for each in mesh.family() if "serve" in each.cmdline())
    os.kill(process.pid, signal.SIGKILL)
    heard: set[tuple[int, str]] = set()

    async def answers() -> bool:
        status, answer = await chat(mesh.url, max_tokens=2)
        if status != 200:
            heard.add((status, answer["error"]["code"]))
        (now,) = await mesh.runners()
        return status == 200 and now.incarnation != runner.incarnation

    await eventually(answers, BACK_SECONDS, "the runner is not back")
    assert {status for status, _ in heard} <= {502, 503}, heard
    assert (state / "a.session").read_text().startswith("ses-")
    assert "no session" not in (mesh.home.parent / "home.out").read_text()
    for aside in state.glob("*.bad"):
        shutil.rmtree(aside) if aside.is_dir() else aside.unlink()


async def test_runner_exit_prints_one_line_on_the_terminal(mesh: MeshProcess) -> None:
    said = (mesh.home.parent / "home.out").read_text().splitlines()
    ends = [line for line in said if line.startswith("weft: runner a ended (SIGKILL)")]
    assert ends
    assert "Traceback" not in "\n".join(said)


@pytest.mark.parametrize(
    ("task", "command"),
    [
        ("registry-sweeper", ["serve", "registry"]),
        pytest.param("task-engine", ["serve", "router"], marks=pytest.mark.nightly("a matrix of tasks that die")),
        pytest.param(
            "fleet-watcher",
            ["serve", "gateway", "--port", "0"],
            marks=pytest.mark.nightly("a matrix of tasks that die"),
        ),
        pytest.param("runner-session", ["serve", "runner"], marks=pytest.mark.nightly("a matrix of tasks that die")),
        pytest.param("ledger-settle", ["up"], marks=pytest.mark.nightly("a matrix of tasks that die")),
    ],
)
async def test_process_exits_with_code_1_and_one_sentence_if_a_critical_task_dies(
    tmp_path: Path, task: str, command: list[str]
) -> None:
    config = write_config(tmp_path, fake_runner("a"))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, DYING_TASK, task, *WEFT),
        *(*command, "--home", str(tmp_path / "home"), "--config", str(config)),
        env=user_environment(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(BACK_SECONDS):
            _, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    lines = [line for line in said.decode().splitlines() if line]
    assert lines == [
        f"weft: the background task {task} died (ZeroDivisionError), so this process ends; its log has the traceback"
    ]
    assert process.returncode == 1
