"""Batches from files of empty lines."""

import asyncio
from collections.abc import AsyncGenerator
from time import thread_time

from gateway.batches.creation import raw_lines


async def test_reading_a_chunk_of_only_newlines_yields_to_other_tasks() -> None:
    longest = 0.0

    async def watch() -> None:
        """The longest wait of another coroutine, in seconds of processor time."""
        nonlocal longest
        while True:
            began = thread_time()
            await asyncio.sleep(0)
            longest = max(longest, thread_time() - began)

    async def content() -> AsyncGenerator[bytes]:
        yield b"\n" * 4 * 1024 * 1024

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0)
    assert [line async for line in raw_lines(content(), 100)] == []
    await asyncio.sleep(0)
    watching.cancel()
    # Without yielding, the wait is several times as long.
    assert longest < 0.05
