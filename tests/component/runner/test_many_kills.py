"""However often a backend is killed, nothing is left behind: no process, file descriptor, thread, task, slot or record.

WEFT_TEST_KILLS=200 runs the long version.
"""

import asyncio
import gc
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import astuple

import pytest
from restart_stage import LONG, Leftovers, Repaving, count_leftovers, repaving

from runner_svc.openai_upstream.client import IDLE_CONNECTION_SECONDS
from runner_svc.policy.backoff import RestartLimits
from runner_svc.policy.lifecycle import Phase
from weft.kernel.errors.reasons import Reason

KILLS = int(os.environ.get("WEFT_TEST_KILLS", "20"))
SIDE_BY_SIDE = 2
"""Instances that are killed at the same time; each kill costs the start of a process."""
RARELY_PAUSED = RestartLimits(max_deaths=1_000_000)
LOOKS = 15
LOOK_PAUSE_SECONDS = IDLE_CONNECTION_SECONDS / 10
"""All looks together take longer than a connection is kept for the next request."""
MAX_POOL_THREADS = 32


@pytest.fixture(autouse=True)
def _only_what_is_new() -> Iterator[None]:
    """The collector is asked again and again: what the tests before have left in memory is none of its business."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


async def _least() -> Leftovers:
    """The least that is held over a while: a look at the engine or a connection that closes comes and goes."""
    seen = []
    for _ in range(LOOKS):
        gc.collect()
        seen.append(count_leftovers())
        await asyncio.sleep(LOOK_PAUSE_SECONDS)
    return Leftovers(*(min(column) for column in zip(*map(astuple, seen), strict=True)))


async def _kill_in_mid_stream(stage: Repaving, times: int) -> None:
    for number in range(times):
        count = stage.instance.restart_count
        await stage.until_phase(Phase.READY)
        stream = await stage.stream(f"r{number}")
        stage.kill()
        error = await stream
        assert error is not None
        assert error.reason is Reason.SERVER_DIED
        assert not stage.instance.slots.holders
        assert not stage.instance.records.running
        await stage.until_restarted(count + 1)


@pytest.mark.nightly("a storm of processes")
@pytest.mark.timeout(600)
async def test_repeated_kills_leave_nothing_behind() -> None:
    async with repaving(limits=RARELY_PAUSED, **LONG) as one, repaving(limits=RARELY_PAUSED, **LONG) as two:
        await _kill_in_mid_stream(one, 1)
        await _kill_in_mid_stream(two, 1)
        for stage in (one, two):
            await stage.until_phase(Phase.READY)
            assert await stage.ask() is None
        # The event loop's own pool of threads grows to its bound with use, and no further.
        await asyncio.gather(*(asyncio.to_thread(time.sleep, 0.1) for _ in range(MAX_POOL_THREADS)))
        before = await _least()
        rounds = KILLS // SIDE_BY_SIDE
        await asyncio.gather(*(_kill_in_mid_stream(stage, rounds) for stage in (one, two)))
        for stage in (one, two):
            await stage.until_phase(Phase.READY)
            assert await stage.ask() is None
            assert stage.instance.restart_count >= rounds
        after = await _least()
        assert all(held <= most for held, most in zip(astuple(after), astuple(before), strict=True)), (
            f"{after} is more than {before}"
        )
    held = count_leftovers()
    assert held.processes == 0


@pytest.mark.nightly("takes seconds to count what is left")
async def test_leftover_count_detects_a_leaked_process_and_file_descriptor() -> None:
    before = await _least()
    leak = os.open("/dev/null", os.O_RDONLY)
    assert count_leftovers().file_descriptors == before.file_descriptors + 1
    os.close(leak)
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-S", "-c", "input()"), stdin=asyncio.subprocess.PIPE
    )
    assert count_leftovers().processes == before.processes + 1
    child.kill()
    await child.wait()
    task = asyncio.create_task(asyncio.sleep(60))
    assert count_leftovers().tasks == before.tasks + 1
    task.cancel()
    assert await _least() == before
