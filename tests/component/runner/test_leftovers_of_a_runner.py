"""A runner ends the processes of its earlier incarnation before it starts any, and records those that it starts."""

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator
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


def _entries(state: Path) -> list[dict[str, object]]:
    return list(msgspec.json.decode(state.read_bytes())["entries"])


async def test_runner_sweeps_leftovers_at_start_and_records_its_backend_until_it_ends(
    orphan: psutil.Process, tmp_path: Path
) -> None:
    state = tmp_path / "r1.children"
    earlier = {"identity": "a-runner", "owner_pid": 2**22, "owner_started_at": 1, "entries": []}
    state.write_bytes(msgspec.json.encode(earlier))
    leftovers = Leftovers(state)
    model = fake_model(engine={"leftovers": leftovers})
    async with running_runner(tmp_path, [model], leftovers=leftovers):
        assert not is_alive(orphan)
        deadline = time.monotonic() + START_SECONDS
        while not any(entry["pid"] for entry in _entries(state)):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        (entry,) = _entries(state)
        assert str(entry["tag"]).startswith("a-runner:")
        engine = psutil.Process(int(str(entry["pid"])))
        assert until(lambda: engine.environ().get(TAG_VARIABLE) == entry["tag"], START_SECONDS)
    assert _entries(state) == []
