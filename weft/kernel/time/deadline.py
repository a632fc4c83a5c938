"""Task cancellation: a check for the current task, blocks that other tasks can end with an error, and deadlines."""

import asyncio
import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")


def task_is_cancelled() -> bool:
    """Whether the current task is cancelled, and not only something that it awaited.

    gRPC also raises CancelledError if only the call was cancelled, for example because its channel was closed.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Interruptible:
    """A block of the current task that other tasks can end with an error of their choice.

    Like `asyncio.timeout`, it cancels the task, so that everything it awaits is released, and turns the cancellation
    into the error at the end of the block. Cancellations from elsewhere pass through.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._already_cancelling = 0
        self._why: Exception | None = None

    def __enter__(self) -> Self:
        self.begin()
        return self

    def begin(self) -> None:
        """Begins the block."""
        self._task = asyncio.current_task()
        assert self._task is not None
        self._already_cancelling = self._task.cancelling()

    def interrupt(self, why: Exception) -> None:
        """Ends the block with `why`. The first caller wins; does nothing once the block has ended."""
        if self._task is not None and self._why is None:
            self._why = why
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended_by = self.end(error)
        if ended_by is not None and ended_by is not error:
            raise ended_by from None

    def end(self, error: BaseException | None) -> BaseException | None:
        """Ends the block; returns the error to raise at its end in place of `error`, None: none."""
        task, self._task = self._task, None
        if self._why is None or task is None:
            return error
        is_own = task.uncancel() <= self._already_cancelling and isinstance(error, asyncio.CancelledError)
        return self._why if is_own else error


class Deadlines(Generic[T]):
    """The deadlines of many calls or blocks, with one timer for all: nearly each ends before its own."""

    def __init__(self, expire: Callable[[T], None]) -> None:
        """`expire` is called with each whose deadline passed."""
        self._expire = expire
        self._by_owner: dict[T, float] = {}
        self._due = math.inf

    def add(self, owner: T, seconds: float) -> None:
        """Adds a deadline that passes after `seconds`."""
        at = self._by_owner[owner] = time.monotonic() + seconds
        if at < self._due:
            self._due = at
            asyncio.get_running_loop().call_at(at, self._look, at)

    def remove(self, owner: T) -> None:
        """Forgets a deadline, if there is one."""
        self._by_owner.pop(owner, None)

    def _look(self, due: float) -> None:
        if due != self._due:
            # An earlier deadline came after this timer.
            return
        for owner in [owner for owner, at in self._by_owner.items() if at <= due]:
            del self._by_owner[owner]
            self._expire(owner)
        self._due = min(self._by_owner.values(), default=math.inf)
        if self._due < math.inf:
            asyncio.get_running_loop().call_at(self._due, self._look, self._due)
