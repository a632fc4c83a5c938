"""Waits with a timeout on the injected clock, and an outcome that many tasks can await."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.time.clock import Clock

_Result = TypeVar("_Result")


async def within(clock: Clock, seconds: float, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Returns the result of `work`. If it takes longer, cancels it, waits for its end and raises TimeoutError."""
    working = asyncio.create_task(work)
    timer = asyncio.create_task(clock.sleep(seconds))
    try:
        await asyncio.wait({working, timer}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise TimeoutError
    finally:
        await end_tasks(working, timer)


async def event_within(clock: Clock, seconds: float | None, event: asyncio.Event) -> bool:
    """Returns whether `event` was set within `seconds`; None: no timeout."""
    if seconds is None:
        return await event.wait()
    try:
        return await within(clock, seconds, event.wait())
    except TimeoutError:
        return event.is_set()


async def first_within(clock: Clock, seconds: float, *events: asyncio.Event) -> None:
    """Returns when one of the events is set, or after `seconds`."""
    timer = asyncio.create_task(clock.sleep(seconds))
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait((timer, *waiting), return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_tasks(timer, *waiting)


async def first_of(*events: asyncio.Event) -> None:
    """Returns when one of the events is set."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_tasks(*waiting)


async def end_tasks(*tasks: "asyncio.Task[Any]") -> None:
    """Cancels tasks and waits until they have ended; their exceptions are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def fresh_copy(error: WeftError) -> WeftError:
    """Returns a copy of an error: a single exception raised in many tasks would collect all their tracebacks."""
    copy = WeftError(
        error.reason, error.message, metadata=error.metadata, retry_after_seconds=error.retry_after_seconds
    )
    copy.engine_exit, copy.engine_log = error.engine_exit, error.engine_log
    return copy


@dataclass(slots=True)
class _Round:
    done: asyncio.Event = field(default_factory=asyncio.Event)
    error: WeftError | None = None

    async def outcome(self) -> None:
        await self.done.wait()
        if self.error is not None:
            raise fresh_copy(self.error)


class SharedOutcome:
    """The outcome of an attempt, shared by all its waiters. After `settle`, new waiters wait for the next attempt."""

    def __init__(self) -> None:
        self._round = _Round()

    def wait(self) -> Coroutine[Any, Any, None]:
        """Waits for the attempt's success; raises its error if it fails. Cancelling one waiter affects no other.

        The attempt is the current one at the call; it may be settled before the returned coroutine runs.
        """
        return self._round.outcome()

    def settle(self, error: WeftError | None = None) -> None:
        """Settles the attempt. None: success."""
        current, self._round = self._round, _Round()
        current.error = error
        current.done.set()
