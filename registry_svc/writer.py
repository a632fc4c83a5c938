"""Serialization of writes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

T = TypeVar("T")

DOUBT_SECONDS = 3.0
"""Interval at which waiting callers look whether a commit is in doubt; less than the timeouts of clients."""
RETRY_AFTER_SECONDS = 1.0


class SingleWriter:
    """Runs writes one at a time, so that the facts on which a write decides still hold when it acts.

    A write that reaches the disk must also reach memory, so one that has begun continues if its caller is cancelled,
    for example because the client has gone. One that has not begun is dropped then. A write whose commit is in doubt
    holds its turn until the database tells its outcome; meanwhile other writes are refused.
    """

    def __init__(self, is_in_doubt: Callable[[], bool]) -> None:
        """`is_in_doubt`: whether the database has not told yet if its last commit took place."""
        self._is_in_doubt = is_in_doubt
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
        """Holds the turn to write during a block that awaits nothing and only changes memory.

        It does not wait for a commit in doubt: runners must not look silent meanwhile.
        """
        while not self._is_in_doubt():
            try:
                async with asyncio.timeout(DOUBT_SECONDS):
                    await self._turn.acquire()
            except TimeoutError:
                continue
            try:
                yield
            finally:
                self._turn.release()
            return
        yield

    async def run(self, write: Callable[[], Awaitable[T]]) -> T:
        """Returns the result of `write`, run in its turn. Once begun it completes even if the caller is gone.

        Raises SHUTTING_DOWN if `drain` cancelled it, and SERVICE_UNAVAILABLE while a commit is in doubt.
        """
        if self._is_in_doubt():
            raise _in_doubt(has_begun=False)
        task = asyncio.create_task(self._in_turn(write), name="registry-write")
        self._running.add(task)
        self._waiting.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(self._waiting.discard)
        # Its caller may leave before it fails.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=DOUBT_SECONDS)
                if not task.done() and self._is_in_doubt():
                    break
        finally:
            has_begun = task not in self._waiting
            if not has_begun:
                task.cancel()
        if not task.done():
            raise _in_doubt(has_begun=has_begun)
        if task.cancelled():
            raise WeftError(Reason.SHUTTING_DOWN, "the registry stopped before this was written")
        return task.result()

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


def _in_doubt(*, has_begun: bool) -> WeftError:
    what = "it has not told whether this was stored" if has_begun else "nothing was changed"
    return WeftError(
        Reason.SERVICE_UNAVAILABLE,
        f"the registry's database broke off a commit and does not answer: {what}; look again when it answers",
        retry_after_seconds=RETRY_AFTER_SECONDS,
    )
