"""Task cancellation: a check for the current task, and blocks that other tasks can end with an error."""

import asyncio
from types import TracebackType
from typing import Self


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
