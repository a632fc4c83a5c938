"""Cancellation of tasks: whether the current one is cancelled, and blocks of it that others can end with an error."""

import asyncio
from types import TracebackType
from typing import Self


def task_is_cancelled() -> bool:
    """Whether the current task is cancelled, and not only something that it awaited.

    gRPC raises CancelledError as well for a call that was cancelled by itself, as when its channel is closed.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Interruptible:
    """A block of the current task that others can end with an error of their choice.

    The task is cancelled, so that whatever it awaits is released at once; on the way out the cancellation becomes that
    error. A cancellation from anywhere else passes through. The same technique as `asyncio.timeout`.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._already_cancelling = 0
        self._why: Exception | None = None

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._already_cancelling = self._task.cancelling()
        return self

    def interrupt(self, why: Exception) -> None:
        """End the block with `why`; the first caller wins, and nothing happens once the block is left."""
        if self._task is not None and self._why is None:
            self._why = why
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if self._why is None or task is None:
            return
        if task.uncancel() <= self._already_cancelling and kind is asyncio.CancelledError:
            raise self._why from None
