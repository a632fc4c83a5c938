"""Tests of `weft up --watch`: which changes of the files are noticed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from weft.kernel.services.service_lifecycle import start_task, stop_tasks
from weft_app.compose.file_watch import WATCH_INTERVAL_SECONDS, Look, look_of, watch_files
from weft_testing.fake_clock import FakeClock


@asynccontextmanager
async def _watching(file: Path, known: Look, clock: FakeClock) -> AsyncIterator[asyncio.Event]:
    changed = asyncio.Event()
    task = start_task(watch_files(lambda: [file], known, changed, clock), name="watch")
    try:
        yield changed
    finally:
        await stop_tasks([task])


async def _look_twice(clock: FakeClock) -> None:
    await clock.advance(2 * WATCH_INTERVAL_SECONDS, sleepers=1)


async def test_change_during_startup_is_detected(tmp_path: Path) -> None:
    file, clock = tmp_path / "weft.yaml", FakeClock()
    file.write_text("runners: []\n")
    known = look_of([file])
    file.write_text("runners: [{name: box}]\n")
    async with _watching(file, known, clock) as changed:
        await _look_twice(clock)
        assert changed.is_set()


async def test_changed_file_is_reloaded_once_after_it_settles(tmp_path: Path) -> None:
    file, clock = tmp_path / "weft.yaml", FakeClock()
    file.write_text("runners: []\n")
    async with _watching(file, look_of([file]), clock) as changed:
        await _look_twice(clock)
        assert not changed.is_set()
        file.write_text("runners: [\n")
        await clock.advance(WATCH_INTERVAL_SECONDS, sleepers=1)
        assert not changed.is_set()
        await clock.advance(WATCH_INTERVAL_SECONDS, sleepers=1)
        assert changed.is_set()
