"""A runner ends the processes of its earlier incarnation before it starts any, and tags those that it starts."""

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import pytest
from kit.engines import fake_model
from runner_harness import running_runner
from supervisor_process import is_alive, until

from runner_svc.supervise.leftovers import TAG_VARIABLE, Leftovers

START_SECONDS = 20.0


@pytest.fixture
def orphan() -> Iterator[psutil.Process]:
    process = subprocess.Popen(["sleep", "100"], env={**os.environ, TAG_VARIABLE: "a-runner:earlier"})
    orphan = psutil.Process(process.pid)
    assert until(lambda: TAG_VARIABLE in orphan.environ(), START_SECONDS)  # it is empty for a moment of exec
    yield orphan
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b'{"identity": 3}', b"\0" * 2_000_000),
        # Invalid UTF-8 is no error of the decoder: the runner did not start.
        b'{"identity": "a-\xff", "owner_pid": 1, "owner_started_at": 1}',
    ],
)
def test_broken_state_file_sweeps_nothing_and_is_rewritten(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "runner.children"
    file.write_bytes(content)
    leftovers = Leftovers(file)
    assert leftovers.sweep() == []
    assert leftovers.begin().startswith(msgspec.json.decode(file.read_bytes())["identity"])


def test_unwritable_state_file_does_not_fail_the_runner(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    leftovers = Leftovers(tmp_path / "file" / "runner.children")
    assert leftovers.sweep() == []
    assert leftovers.begin()


async def test_runner_sweeps_leftovers_at_start_and_tags_its_backend(orphan: psutil.Process, tmp_path: Path) -> None:
    state = tmp_path / "r1.children"
    earlier = {"identity": "a-runner", "owner_pid": 2**22, "owner_started_at": 1}
    state.write_bytes(msgspec.json.encode(earlier))
    leftovers = Leftovers(state)
    model = fake_model(engine={"leftovers": leftovers})
    async with running_runner(tmp_path, [model], leftovers=leftovers):
        assert not is_alive(orphan)
        deadline = time.monotonic() + START_SECONDS
        while not _tagged():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
    assert not _tagged()


def _tagged() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(TAG_VARIABLE, "").startswith("a-runner:") and is_alive(process):
                found.append(process)
    return found
