"""A file may be nothing but line ends."""

import asyncio
from collections.abc import AsyncGenerator

from gateway.batches.lines import raw_lines


async def test_others_have_their_turn_while_a_piece_of_nothing_but_line_ends_is_read() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def content() -> AsyncGenerator[bytes]:
        yield b"\n" * 1024 * 1024

    counting = asyncio.create_task(count())
    assert [line async for line in raw_lines(content(), 100)] == []
    counting.cancel()
    assert turns > 10
