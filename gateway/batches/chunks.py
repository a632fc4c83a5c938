"""Bytes on their way to and from whoever keeps files: cut to one size, and waited for within a time."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from contextlib import aclosing
from time import monotonic
from typing import TypeVar

from weft.durable.files import MAX_PIECE_BYTES
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

Answer = TypeVar("Answer")

SLICE_SECONDS = 0.005
"""How long work for the processor goes on until others have their turn."""
HOLD_SECONDS = 5.0
"""How long bytes that have come in are held to fill a piece: who hears nothing for long takes a stream for broken."""
_NO_MORE = object()


class Breather:
    """Gives others their turn in work that would go on for long without waiting for anything."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()

    async def breathe(self) -> None:
        """Let others run, if it is time. Call it after each small piece of work."""
        if self._loop.time() - self._began >= SLICE_SECONDS:
            await asyncio.sleep(0)
            self._began = self._loop.time()


async def in_chunks(
    content: AsyncIterable[bytes], size: int = MAX_PIECE_BYTES, *, now: Callable[[], float] = monotonic
) -> AsyncGenerator[bytes]:
    """The same bytes in pieces of `size`: keepers pay by the piece. Only the last one is smaller, and slow ones."""
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


async def in_time(answer: Awaitable[Answer], seconds: float) -> Answer:
    """What whoever keeps files and batches answers. Raises SERVICE_UNAVAILABLE where that takes too long."""
    try:
        async with asyncio.timeout(seconds):
            return await answer
    except TimeoutError:
        message = "file and batch store timed out"
        raise WeftError(Reason.SERVICE_UNAVAILABLE, message, retry_after_seconds=1) from None


async def each_in_time(pieces: AsyncGenerator[Answer], seconds: float) -> AsyncGenerator[Answer]:
    """The same, each within a time. Raises as `in_time`."""
    async with aclosing(pieces):
        while True:
            piece = await in_time(anext(pieces, _NO_MORE), seconds)
            if piece is _NO_MORE:
                return
            yield piece  # type: ignore[misc]  # all that is not the mark
