"""Chunks of fixed size for files between the caller and the file store."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from time import monotonic

from weft.durable.batches import MAX_PIECE_BYTES

SLICE_SECONDS = 0.005
"""Maximum run time of CPU-bound work before it yields to the event loop."""
HOLD_SECONDS = 5.0
"""Maximum time that received bytes are held to fill a chunk: the store treats a silent stream as broken."""


class EventLoopYielder:
    """Yields to the event loop in CPU-bound loops."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()

    async def yield_if_due(self) -> None:
        """Yields if SLICE_SECONDS have passed. Call it after each small unit of work."""
        if self._loop.time() - self._began >= SLICE_SECONDS:
            await asyncio.sleep(0)
            self._began = self._loop.time()


async def in_chunks(
    content: AsyncIterable[bytes], size: int = MAX_PIECE_BYTES, *, now: Callable[[], float] = monotonic
) -> AsyncGenerator[bytes]:
    """Regroups bytes into chunks of `size`, as stores pay per chunk. Only the last and slow ones are smaller."""
    gathered = bytearray()
    handed_on = now()
    async for piece in content:
        gathered += piece
        while len(gathered) >= size:
            yield bytes(memoryview(gathered)[:size])
            del gathered[:size]
            handed_on = now()
        if gathered and now() - handed_on >= HOLD_SECONDS:
            yield bytes(gathered)
            gathered.clear()
            handed_on = now()
    if gathered:
        yield bytes(gathered)
