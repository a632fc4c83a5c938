"""Serialization of writes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

T = TypeVar("T")


class SingleWriter:
    """Runs writes one at a time, so that the facts on which a write decides still hold when it acts.

    A write that reaches the disk must also reach memory, so one that has begun continues if its caller is cancelled,
    for example because the client has gone. One that has not begun is dropped then.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._running: set[asyncio.Task[Any]] = set()
        self._waiting: set[asyncio.Task[Any]] = set()
        """Writes of `_running` that still wait for their turn."""

    @property
    def waiting(self) -> int:
        """Number of writes that wait for their turn."""
        return len(self._waiting)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Holds the turn to write during a block that awaits nothing."""
        async with self._turn:
            yield

    async def run(self, write: Callable[[], Awaitable[T]]) -> T:
        """Returns the result of `write`, run in its turn. Once begun it completes even if the caller is gone.

        Raises SHUTTING_DOWN if `drain` cancelled it.
        """
        task = asyncio.create_task(self._in_turn(write), name="registry-write")
        self._running.add(task)
        self._waiting.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(self._waiting.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise WeftError(Reason.SHUTTING_DOWN, "the registry stopped before this was written") from None
            if task in self._waiting:
                task.cancel()
            raise

    async def drain(self, limit_seconds: float) -> None:
        """Waits until all writes have ended, and cancels those still running after `limit_seconds`."""
        if not self._running:
            return
        _, late = await asyncio.wait(self._running, timeout=limit_seconds)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)

    async def _in_turn(self, write: Callable[[], Awaitable[T]]) -> T:
        async with self._turn:
            self._waiting.difference_update({asyncio.current_task()})
            return await write()
