"""Chunks of files between the caller and the file store: fixed size, with a timeout for each."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from contextlib import aclosing
from time import monotonic
from typing import TypeVar

from weft.durable.batches import MAX_PIECE_BYTES
from weft.kernel.time_limit import store_answer

Answer = TypeVar("Answer")

STORE = "file and batch store"
RETRY_AFTER_SECONDS = 1.0

SLICE_SECONDS = 0.005
"""How long CPU-bound work runs before it yields to the event loop."""
HOLD_SECONDS = 5.0
"""How long received bytes are held to fill a chunk: the store treats a silent stream as broken."""


class EventLoopYielder:
    """Yields to the event loop in CPU-bound loops."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()

    async def yield_if_due(self) -> None:
        """Yield if SLICE_SECONDS have passed. Call it after each small unit of work."""
        if self._loop.time() - self._began >= SLICE_SECONDS:
            await asyncio.sleep(0)
            self._began = self._loop.time()


async def in_chunks(
    content: AsyncIterable[bytes], size: int = MAX_PIECE_BYTES, *, now: Callable[[], float] = monotonic
) -> AsyncGenerator[bytes]:
    """Regroups bytes into chunks of `size`: stores pay per chunk. Only the last chunk and slow ones are smaller."""
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


async def each_in_time(pieces: AsyncGenerator[Answer], seconds: float) -> AsyncGenerator[Answer]:
    """Iterates over chunks of a store, each within `seconds`. Raises SERVICE_UNAVAILABLE where one takes longer."""
    async with aclosing(pieces):
        while True:
            piece = await store_answer(seconds, _next(pieces), STORE, retry_after_seconds=RETRY_AFTER_SECONDS)
            if piece is None:
                return
            yield piece[0]


async def _next(pieces: AsyncGenerator[Answer]) -> tuple[Answer] | None:
    async for piece in pieces:
        return (piece,)
    return None
