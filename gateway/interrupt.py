"""Ending a request from outside: the caller hung up, reads too slowly, or its time is over."""

import asyncio
from types import TracebackType
from typing import Self

from starlette.types import Receive

from gateway.errors import ClientGoneError
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


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


async def interrupt_on_disconnect(receive: Receive, block: Interruptible) -> None:
    """Wait until the caller hangs up, then end `block` with ClientGoneError. Run it as a task beside the block."""
    while (await receive())["type"] != "http.disconnect":
        pass
    block.interrupt(ClientGoneError())


def deadline_passed(block: Interruptible) -> None:
    """End `block` with DEADLINE_EXCEEDED: a last resort, for a request whose own deadline did not end it."""
    block.interrupt(WeftError(Reason.DEADLINE_EXCEEDED, "the request's deadline passed"))
