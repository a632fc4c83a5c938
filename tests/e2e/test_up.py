"""The life of `weft up`: one owner per home, a word when ready, a drain on Ctrl-C, and nothing left behind."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from chats import chat
from mesh_process import (
    COLD_WEFT,
    MeshProcess,
    alive,
    eventually,
    fake_runner,
    run_weft,
    running_mesh,
    write_config,
)

from weft_app.compose.home import MAX_SOCKET_PATH_BYTES


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    """A mesh whose start and end are not the subject."""
    folder = tmp_path_factory.mktemp("up")
    config = write_config(folder, fake_runner("a", tokens_per_second=20, answer_tokens=20))
    with running_mesh(folder / "home", "--config", str(config)) as mesh:
        yield mesh


async def test_second_up_on_the_same_home_fails_and_names_the_first(running: MeshProcess) -> None:
    code, _, error = await run_weft("up", home=running.home)
    assert code == 4
    assert f"pid {running.process.pid}" in error
    assert running.url in error
    assert "--home" in error
    assert (await chat(running.url))[0] == 200, "the first one was disturbed"


async def test_ctrl_c_lets_a_running_request_finish_and_removes_up_json(tmp_path: Path) -> None:
    """Started as by a user: how processes end is the subject, and forked ones end without Python's teardown."""
    config = write_config(tmp_path, fake_runner("a", tokens_per_second=10, answer_tokens=20), drain_seconds=60.0)
    with running_mesh(tmp_path / "home", "--config", str(config), weft=COLD_WEFT) as mesh:
        text = (mesh.home / "run" / "up.json").read_text()
        assert text.count("\n") == 1
        facts = json.loads(text)
        assert facts["pids"]["host"] == mesh.process.pid
        assert psutil.pid_exists(facts["pids"]["runners"]["a"])
        # Found before the request: on a busy machine that takes longer than an answer.
        async with await mesh.backend("a") as backend:
            asking = asyncio.create_task(chat(mesh.url))
            await backend.wait_for_state(lambda state: state.busy_slots == 1)
        mesh.process.send_signal(signal.SIGINT)
        status, answer = await asking
        assert status == 200
        assert answer["usage"]["completion_tokens"] == 20
        assert mesh.stop() == 0
        assert not (mesh.home / "run" / "up.json").exists()


async def test_second_ctrl_c_does_not_wait_for_running_requests(tmp_path: Path) -> None:
    config = write_config(tmp_path, fake_runner("a", prefill_seconds=60.0), drain_seconds=60.0)
    with running_mesh(tmp_path / "home", "--config", str(config), weft=COLD_WEFT) as mesh:
        asking = asyncio.create_task(chat(mesh.url))
        async with await mesh.backend("a") as backend:
            await backend.wait_for_state(lambda state: state.busy_slots == 1)
        mesh.process.send_signal(signal.SIGINT)
        output = tmp_path / "home.out"
        await eventually(lambda: "stopping" in output.read_text(), 5.0, "the first Ctrl-C was not noticed")
        mesh.process.send_signal(signal.SIGINT)
        await asyncio.to_thread(mesh.process.wait, 30)
        await asyncio.gather(asking, return_exceptions=True)


async def test_kill_9_of_the_host_leaves_no_process_and_a_reusable_home(tmp_path: Path) -> None:
    config = write_config(tmp_path, fake_runner("a"))
    with running_mesh(tmp_path / "home", "--config", str(config)) as mesh:
        family = mesh.family()
        assert len(family) >= 3, "host, runner and backend"
        os.kill(mesh.process.pid, signal.SIGKILL)
        await eventually(lambda: not alive(family), 2.0, "processes outlived the host")
        mesh.process.wait()
        assert (mesh.home / "run" / "up.json").exists()
        (mesh.home / "run" / "up.json").write_text("left behind")
    with running_mesh(tmp_path / "home", "--config", str(config)) as again:
        assert (await chat(again.url))[0] == 200


async def test_all_files_are_under_the_home(running: MeshProcess) -> None:
    await chat(running.url)
    written = {
        file.path
        for process in running.family()
        for file in process.open_files()
        if "w" in file.mode or "a" in file.mode
    }
    outside = {path for path in written if not path.startswith(str(running.home.parent))}
    assert not outside


async def test_home_with_a_path_too_long_for_a_socket_runs_beside_another_mesh(
    running: MeshProcess, tmp_path: Path
) -> None:
    home = tmp_path / ("deep" * 30)
    assert len(os.fsencode(home)) > MAX_SOCKET_PATH_BYTES
    config = write_config(tmp_path, fake_runner("a", text="the other mesh"))
    with running_mesh(home, "--config", str(config)) as other:
        assert other.grpc.startswith("127.0.0.1:")
        status, answer = await chat(other.url)
        assert (status, "the other mesh" in json.dumps(answer)) == (200, True)
        status, answer = await chat(running.url)
        assert (status, "the other mesh" in json.dumps(answer)) == (200, False)


async def test_runner_that_keeps_failing_to_start_fails_with_its_last_output(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = write_config(tmp_path, {**fake_runner("a"), "http_port": port})
        async with asyncio.timeout(60):
            code, _, error = await run_weft("up", "--config", str(config), home=tmp_path / "home")
    assert code == 1
    assert f"runner a does not start: port {port} on 127.0.0.1 is taken by another program" in error
