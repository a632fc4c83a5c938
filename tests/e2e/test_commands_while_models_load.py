"""Commands of a mesh whose services listen while a model still loads: they found no mesh until the last was ready."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mesh_process import START_SECONDS, WEFT, MeshProcess, eventually, fake_runner, run_weft, user_environment
from mesh_process import write_config as write

from weft_app.cli.options import EXIT_CONFLICT, EXIT_NOT_FOUND, EXIT_OK
from weft_app.compose.home import WeftHome, has_started


class Start:
    """A `weft` command that starts a mesh, as far as it has come."""

    def __init__(self, home: Path, process: asyncio.subprocess.Process) -> None:
        self.home = WeftHome(home)
        self.process = process

    async def listening(self) -> dict[str, Any]:
        """What the mesh says of itself once its services listen."""
        found: dict[str, Any] = await eventually(self.home.running, START_SECONDS, "the mesh is not announced")
        return found

    async def loading(self) -> None:
        """Returns once `weft ps` shows that the model loads."""
        await self.listening()

        async def is_shown() -> bool:
            code, shown, error = await self.weft("ps")
            assert code == EXIT_OK, error
            return "m-a" in shown and "loading" in shown

        await eventually(is_shown, START_SECONDS, "the model is not shown as loading")

    async def let_load(self) -> None:
        """Has the engine be ready."""
        mesh = MeshProcess(self.home.root, None)  # type: ignore[arg-type]
        mesh.facts = await self.listening()
        async with await mesh.backend("a") as backend:
            await backend.set_behaviour(never_healthy=False)

    async def weft(self, *arguments: str) -> tuple[int, str, str]:
        return await run_weft(*arguments, home=self.home.root)

    async def status(self) -> dict[str, Any]:
        code, shown, error = await self.weft("status", "-o", "json")
        assert code == EXIT_OK, error
        found: dict[str, Any] = json.loads(shown)
        return found


@asynccontextmanager
async def started(folder: Path, *arguments: str, **switches: Any) -> AsyncIterator[Start]:
    config, home = write(folder, fake_runner("a", **switches)), folder / "home"
    process = await asyncio.create_subprocess_exec(
        *WEFT, "up", *arguments, "--config", str(config), "--home", str(home),
        env=user_environment(), stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        yield Start(home, process)
    finally:
        await run_weft("stop", "--now", home=home)
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def test_every_command_finds_a_mesh_with_a_loading_model(tmp_path: Path) -> None:
    async with started(tmp_path, never_healthy=True) as start:
        await start.loading()
        status = await start.status()
        assert status["state"] == "starting"
        assert "problem" not in status
        assert [model["name"] for model in status["models"]] == ["m-a"]
        code, shown, error = await start.weft("get", "runners")
        assert (code, "a" in shown) == (EXIT_OK, True), error
        chat = asyncio.create_task(start.weft("chat", "m-a", "hello"))
        load = asyncio.create_task(start.weft("mesh", "wait", "model", "m-a", "--for", "ready"))
        reload, _, why = await start.weft("mesh", "reload")
        assert (reload != EXIT_OK, "the mesh is starting" in why) == (True, True)
        assert not chat.done()
        assert not load.done()
        await start.let_load()
        code, answer, error = await chat
        assert (code, bool(answer.strip())) == (EXIT_OK, True), error
        assert (await load)[0] == EXIT_OK
        await eventually(lambda: has_started(start.home.running()), START_SECONDS, "the mesh is not up")
        assert (await start.status())["state"] == "running"


async def test_stopping_a_mesh_while_a_model_loads_removes_its_announcement(tmp_path: Path) -> None:
    async with started(tmp_path, never_healthy=True) as start:
        await start.loading()
        code, shown, error = await start.weft("stop")
        assert (code, shown) == (EXIT_OK, f"stopped the mesh on {start.home.root}\n"), error
        assert await start.process.wait() == 0
        assert not start.home.up_file.exists()
        assert (await start.weft("status"))[0] == EXIT_NOT_FOUND


async def test_background_start_returns_when_models_are_ready_rather_than_when_ports_listen(
    tmp_path: Path,
) -> None:
    async with started(tmp_path, "-d", never_healthy=True) as start:
        await start.loading()
        assert start.process.returncode is None
        assert not has_started(start.home.running())
        await start.let_load()
        assert start.process.stdout is not None
        shown = (await start.process.stdout.read()).decode()
        assert await start.process.wait() == EXIT_OK, shown
        assert has_started(start.home.running())
        owner, home = start.home.owner(), start.home.root
        assert "weft is up" in shown
        assert "stop with Ctrl-C" not in shown
        assert f"(pid {owner})" in shown
        assert str(home / "logs" / "up.out") in shown
        code, answer, error = await start.weft("chat", "m-a", "hello")
        assert (code, bool(answer.strip())) == (EXIT_OK, True), error
        code, _, error = await start.weft("up", "-d", "--config", str(tmp_path / "weft.yaml"))
        assert (code, f"another weft (pid {owner}) runs on {home}" in error) == (EXIT_CONFLICT, True), error
        assert start.home.owner() == owner, "the second start changed nothing"
        code, shown, error = await start.weft("down")
        assert (code, shown) == (EXIT_OK, f"stopped the mesh on {home}\n"), error
        assert (await start.weft("status"))[0] == EXIT_NOT_FOUND


@pytest.mark.parametrize(
    "arguments",
    [(), pytest.param(("-d",), marks=pytest.mark.nightly("the same, in the background"))],
    ids=["in front", "in the background"],
)
async def test_start_that_fails_after_listening_removes_its_announcement(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    async with started(tmp_path, *arguments, exit_at_start=3, load_seconds=0.1) as start:
        assert start.process.stdout is not None
        output = (await start.process.stdout.read()).decode()
        assert (await start.process.wait() != 0, "m-a does not start on a" in output) == (True, True), output
        assert "exit code 3" in output
        assert "listening at" in output
        assert not start.home.up_file.exists()
        assert not start.home.is_claimed()
