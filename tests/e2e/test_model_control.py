"""Loading, unloading and reading the log of one model, from the command line."""

import asyncio
import signal
from pathlib import Path

import pytest
from mesh_process import (
    WEFT,
    MeshProcess,
    eventually,
    run_weft,
    running_mesh,
    take_interrupts,
    user_environment,
    write_config,
)
from sleepy_server import SleepyServer


@pytest.fixture
def mesh(common_mesh: MeshProcess) -> MeshProcess:
    return common_mesh


async def test_a_model_is_unloaded_loaded_and_its_log_is_read(mesh: MeshProcess) -> None:
    code, out, _ = await run_weft("logs", "m-a", home=mesh.home)
    assert code == 0
    assert "listening on" in out
    code, out, _ = await run_weft("unload", "m-a", home=mesh.home)
    assert (code, out) == (0, "model/m-a unloaded\n")
    assert (await mesh.describe("a")).process_id == 0
    code, out, _ = await run_weft("load", "m-a", home=mesh.home)
    assert (code, out) == (0, "model/m-a loaded\n")
    assert (await mesh.describe("a")).process_id > 0


async def test_a_model_that_cannot_be_put_to_sleep_says_so(tmp_path: Path) -> None:
    server = SleepyServer(tmp_path / "server")
    try:
        config = write_config(tmp_path, server.runner("box", "sleepy"))
        with running_mesh(tmp_path / "home", "--config", str(config)) as mesh:
            assert (await run_weft("load", "sleepy", home=mesh.home))[0] == 0
            code, _, error = await run_weft("unload", "sleepy", home=mesh.home)
            assert code == 1
            assert "sleep" in error
            assert (await run_weft("load", "nobody", home=mesh.home))[0] == 3
    finally:
        server.end()


async def test_a_followed_log_shows_new_lines_until_ctrl_c(mesh: MeshProcess, tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    before = (await run_weft("logs", "m-a", "-n", "1000", home=mesh.home))[1].count("listening on")
    with shown.open("wb") as output:
        follower = await asyncio.create_subprocess_exec(
            *(*WEFT, "logs", "m-a", "-f", "-n", "1000", "--home", str(mesh.home)),
            env=user_environment(),
            stdout=output,
            stderr=output,
            preexec_fn=take_interrupts,
        )
    try:
        await eventually(lambda: shown.read_text().count("listening on") == before, 10.0, "no line is shown")
        await run_weft("unload", "m-a", home=mesh.home)
        await run_weft("load", "m-a", home=mesh.home)
        await eventually(lambda: shown.read_text().count("listening on") == before + 1, 10.0, "no new line is shown")
    finally:
        follower.send_signal(signal.SIGINT)
        try:
            async with asyncio.timeout(10):
                code = await follower.wait()
        except TimeoutError:
            follower.kill()
            code = await follower.wait()
    assert code == 0
