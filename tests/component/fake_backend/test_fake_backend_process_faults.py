"""Misbehaviour of the process as a whole."""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import aiohttp
import psutil
import pytest
from fake_backend_client import fake
from kit.own_children import lives
from kit.waiting import until

from weft_testing.fake_backend.process import fake_backend_command


def _stdout_of(pid: int) -> Path:
    return Path(f"/proc/{pid}/fd/1").readlink()


async def _wait_until_gone(pid: int) -> None:
    async def gone() -> bool:
        return not lives(pid)

    await until(gone)


async def test_sigterm_can_be_ignored_until_sigkill() -> None:
    async with fake(ignore_sigterm=True) as client:
        client.backend.signal(signal.SIGTERM)
        client.backend.signal(signal.SIGTERM)
        assert (await client.get("/health")).status == 200
        client.backend.signal(signal.SIGKILL)
        assert await client.backend.wait_exit() == -signal.SIGKILL


async def test_process_that_dies_while_loading_is_never_healthy() -> None:
    """Between the end of its load and its exit it was, for a moment: a mesh on a busy machine came up with it."""
    async with fake(exit_at_start=7, load_seconds=0.1) as client:
        statuses = set[int]()
        with contextlib.suppress(aiohttp.ClientError):
            while True:
                statuses.add((await client.get("/health")).status)
        assert await client.backend.wait_exit() == 7
    assert statuses <= {503}


async def test_grandchild_holds_the_pipes_and_outlives_the_process() -> None:
    async with fake(fork_grandchild=True) as client:
        grandchild = (await client.backend.state()).grandchild_pid
        assert grandchild is not None
        assert os.getpgid(grandchild) == client.backend.pid
        assert _stdout_of(grandchild) == _stdout_of(client.backend.pid)
        client.backend.signal(signal.SIGTERM)
        assert await client.backend.wait_exit() == 0
        assert lives(grandchild)
    await _wait_until_gone(grandchild)


async def test_grandchild_can_leave_the_process_group_and_start_later() -> None:
    async with fake() as client:
        assert (await client.backend.state()).grandchild_pid is None
        await client.backend.set_behaviour(fork_grandchild=True, grandchild_setsid=True)
        grandchild = (await client.backend.state()).grandchild_pid
        assert grandchild is not None
        assert os.getpgid(grandchild) == grandchild
    await _wait_until_gone(grandchild)


@pytest.mark.slow("fills a pipe")
async def test_stderr_is_flooded_until_it_is_read() -> None:
    read_end, write_end = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *fake_backend_command(stderr_flood_bytes=1_000_000),
        stdout=asyncio.subprocess.PIPE,
        stderr=write_end,
        start_new_session=True,
    )
    os.close(write_end)
    try:
        assert process.stdout is not None
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(process.stdout.readline(), 1.0)
        flood = await asyncio.to_thread(_read_bytes, read_end, 1_000_000)
        assert flood.startswith(b"flood flood")
        assert (await asyncio.wait_for(process.stdout.readline(), 5)).startswith(b"listening on http://127.0.0.1:")
    finally:
        os.close(read_end)
        process.kill()
        await process.wait()


def _read_bytes(descriptor: int, count: int) -> bytes:
    received = bytearray()
    while len(received) < count and (chunk := os.read(descriptor, 65536)):
        received += chunk
    return bytes(received)


async def test_fake_backend_exits_with_its_parent() -> None:
    parent_code = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:]); time.sleep(60)"
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-S", "-c", parent_code, *fake_backend_command("--die-with-parent")),
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert parent.stdout is not None
    line = await asyncio.wait_for(parent.stdout.readline(), 20)
    assert line.startswith(b"listening on ")
    (child,) = psutil.Process(parent.pid).children()
    parent.kill()
    await parent.wait()
    await _wait_until_gone(child.pid)


async def test_leaving_the_block_leaves_no_process() -> None:
    async with fake("--parallel", "1", stall_after_tokens=0, ignore_sigterm=True) as client:
        request = asyncio.create_task(client.chat())
        await client.backend.wait_for_state(lambda state: state.active_requests == 1)
        pid = client.backend.pid
        request.cancel()
    assert not lives(pid)
