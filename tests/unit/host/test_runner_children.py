"""The host's runner processes."""

import asyncio
import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from runner_svc.runner_settings import RunnerSettings
from weft.dispatch.fleet import ExpectedMesh
from weft.kernel.errors.error_tree import WeftError
from weft_app.compose.configuration import ConfigurationSource
from weft_app.compose.home import WeftHome
from weft_app.compose.reload import MeshReload
from weft_app.compose.runner_processes import MAX_REFUSALS, RunnerChild
from weft_testing.fake_clock import FakeClock


class Ended:
    """A process that ends when it is told so."""

    pid = 7
    returncode = None

    def __init__(self) -> None:
        self.over = asyncio.Event()

    async def wait(self) -> int:
        await self.over.wait()
        return 1


async def test_runner_with_a_temporary_start_failure_is_restarted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of processes or open files, reached in the moment of a restart, must not be the runner's end."""
    first, second = Ended(), Ended()
    spawns: list[Ended | OSError] = [first, OSError(errno.EAGAIN, "full"), OSError(errno.EMFILE, "full"), second]

    async def spawn(_: RunnerChild) -> Ended:
        outcome = spawns.pop(0)
        if isinstance(outcome, OSError):
            raise outcome
        return outcome

    monkeypatch.setattr(RunnerChild, "_spawn", spawn)
    clock = FakeClock()
    child = RunnerChild("a", [], tmp_path / "out", clock)
    await child.start()
    first.over.set()
    for _ in range(3):
        await clock.wait_for_sleepers(1)
        await clock.advance(1.0)
    assert not spawns
    second.returncode = 0  # type: ignore[assignment]  # as a process that ended meanwhile
    await child.stop(0.0)


async def test_runner_whose_first_start_fails_is_started_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reload that added the runner failed, and no later one started it: it was in force already."""
    process = Ended()
    spawns: list[Ended | OSError] = [*(OSError(errno.EAGAIN, "full") for _ in range(MAX_REFUSALS)), process]

    async def spawn(_: RunnerChild) -> Ended:
        outcome = spawns.pop(0)
        if isinstance(outcome, OSError):
            raise outcome
        return outcome

    monkeypatch.setattr(RunnerChild, "_spawn", spawn)
    clock = FakeClock()
    child = RunnerChild("a", [], tmp_path / "out", clock)
    await child.start()
    for _ in range(MAX_REFUSALS - 1):
        assert not child.refusal
        await clock.wait_for_sleepers(1)
        await clock.advance(1.0)
    await clock.wait_for_sleepers(1)
    assert (child.pid, child.refusal) == (None, "its process cannot be started: full")
    await clock.advance(1.0)
    assert (child.pid, child.refusal) == (process.pid, "")
    process.returncode = 0  # type: ignore[assignment]  # as a process that ended meanwhile
    await child.stop(0.0)


async def test_runner_exit_is_reported_with_its_last_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process, said, output = Ended(), list[str](), tmp_path / "out"

    async def spawn(_: RunnerChild) -> Ended:
        output.write_text("runner serves at unix:/r\nweft: the background task runner-session died (OSError)\n")
        return process

    monkeypatch.setattr(RunnerChild, "_spawn", spawn)
    clock = FakeClock()
    child = RunnerChild("a", [], output, clock, notify=said.append)
    await child.start()
    process.over.set()
    await clock.wait_for_sleepers(1)
    assert said == ["runner a ended (exit code 1): the background task runner-session died (OSError); it is restarted"]
    process.returncode = 1  # type: ignore[assignment]  # as a process that has ended
    await child.stop(0.0)


class Runners:
    """Runner processes, of which those in `refused` do not start before a reload."""

    def __init__(self, refused: str = "") -> None:
        self.view: Any = SimpleNamespace(runners={}, models={})
        self.started = list[str]()
        self._refused = refused

    def refusal(self, name: str) -> str:
        return "its process cannot be started: full" if name == self._refused else ""

    async def stop(self, _: str, grace_seconds: float) -> None:
        assert grace_seconds > 0

    async def start(self, section: RunnerSettings) -> None:
        self.started.append(section.name)
        self.view.runners[section.name] = SimpleNamespace(active=True)


def reload_of(file: Path, home: WeftHome, runners: Runners) -> MeshReload:
    home.create()
    source = ConfigurationSource(path=file)
    nothing: Any = SimpleNamespace(expect=lambda _: None, expect_not=lambda _: None, reconfigure=lambda _: None)
    return MeshReload(
        source=source,
        current=source.read(),
        changed=lambda _: None,
        home=home,
        config_file=home.run / "config.yaml",
        runners=cast("Any", runners),
        registry=nothing,
        names=nothing,
        fleet=cast("Any", SimpleNamespace(view=runners.view)),
        router=nothing,
        edge=nothing,
        expected=ExpectedMesh(),
        names_waited_for=nothing,
        clock=FakeClock(),
    )


async def test_reload_restarts_a_runner_that_does_not_start_although_nothing_has_changed(tmp_path: Path) -> None:
    (tmp_path / "weft.yaml").write_text("runners: [{name: a, models: [{name: m, path: /m.gguf}]}]\n")
    runners = Runners(refused="a")
    reload = reload_of(tmp_path / "weft.yaml", WeftHome(tmp_path / "home"), runners)
    await reload.reload(dry_run=True)
    assert not runners.started
    answer = await reload.reload(dry_run=False)
    assert (runners.started, list(answer.notes)) == (["a"], ["runner a did not start, and is started again"])
    await reload.reload(dry_run=False)
    assert runners.started == ["a"], "it serves, and is not interrupted"


async def test_reload_whose_certificate_cannot_be_written_changes_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    """It was in force already, so a later reload saw no change and did not start the new runner."""
    file, home, runners = tmp_path / "weft.yaml", WeftHome(tmp_path / "home"), Runners()
    file.write_text("gateway: {tls: {self_signed: true}}\nrunners: []\n")
    reload = reload_of(file, home, runners)
    file.write_text(
        "gateway: {tls: {self_signed: true}, allowed_hosts: [new.example]}\n"
        "runners: [{name: a, models: [{name: m, path: /m.gguf}]}]\n"
    )
    (home.state / "edge").write_text("in the way")
    with pytest.raises(WeftError, match="edge"):
        await reload.reload(dry_run=False)
    assert not runners.started
    (home.state / "edge").unlink()
    await reload.reload(dry_run=False)
    assert runners.started == ["a"]
