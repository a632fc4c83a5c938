"""The host's runner processes."""

import asyncio
import errno
from pathlib import Path

import pytest

from weft_app.compose.runner_processes import RunnerChild
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
