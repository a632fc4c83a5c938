"""A file may be nothing but line ends."""

import asyncio
from collections.abc import AsyncGenerator
from time import thread_time

from gateway.batches.making import raw_lines


async def test_others_have_their_turn_while_a_piece_of_nothing_but_line_ends_is_read() -> None:
    longest = 0.0

    async def watch() -> None:
        """How long others wait, in seconds of work: what the machine does besides is not counted."""
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
    # All of it in one go is several times that.
    assert longest < 0.05
