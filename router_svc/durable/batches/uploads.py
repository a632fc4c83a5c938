"""What comes in pieces, and is kept whole or not at all."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import structlog

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.service import start_task, stop_tasks

INTAKE_LIMIT_SECONDS = 3_600.0
"""What is not whole so long after it was begun has broken off. So nothing may take longer to come in."""
RETRY_SECONDS = 5.0

log = structlog.get_logger("weft.router")


class Uploads:
    """Those of one kind that come in at this moment."""

    def __init__(self, kind: str, most: int) -> None:
        self._kind = kind
        self._most = most
        self._under_way = 0
        self._undoing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def one(self, undo: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
        """While one comes in. `undo`: what removes it if it does not come to its end, even if the caller is cancelled.

        Raises TOO_MANY_RESOURCES where as many come in as may.
        """
        if self._under_way >= self._most:
            raise WeftError(
                Reason.TOO_MANY_RESOURCES,
                f"{self._most} {self._kind} are being taken in at once; send it again in a moment",
                retry_after_seconds=RETRY_SECONDS,
            )
        self._under_way += 1
        try:
            yield
        except BaseException:
            undoing = start_task(self._undo(undo), name=f"undo-{self._kind}")
            self._undoing.add(undoing)
            undoing.add_done_callback(self._undoing.discard)
            await asyncio.shield(undoing)
            raise
        finally:
            self._under_way -= 1

    async def stop(self, grace_seconds: float) -> None:
        """Let what is being removed be removed, for so long; a sweep does the rest."""
        if self._undoing:
            await asyncio.wait(self._undoing, timeout=grace_seconds)
        await stop_tasks(self._undoing)

    async def _undo(self, undo: Callable[[], Awaitable[None]]) -> None:
        try:
            await undo()
        except WeftError as error:
            # Nobody sees what is left, and the sweep comes by.
            log.error("what broke off was not removed", kind=self._kind, reason=error.reason.name)  # noqa: TRY400


def upload_timed_out(kind: str) -> WeftError:
    """What is said of one that was given up meanwhile."""
    return WeftError(
        Reason.DEADLINE_EXCEEDED, f"the {kind} did not come in within {INTAKE_LIMIT_SECONDS:.0f} seconds; send it anew"
    )


IDLE_SECONDS = 60.0
"""How long a caller may send nothing."""

MessageT = TypeVar("MessageT")


async def with_idle_timeout(
    messages: AsyncIterator[MessageT], *, idle_seconds: float = IDLE_SECONDS
) -> AsyncGenerator[MessageT]:
    """Every message. Raises DEADLINE_EXCEEDED where none comes for so long."""
    while True:
        try:
            async with asyncio.timeout(idle_seconds):
                message = await anext(messages)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise WeftError(Reason.DEADLINE_EXCEEDED, f"nothing came for {idle_seconds:g} seconds") from error
        yield message


def incomplete_stream() -> WeftError:
    """What is said, to whoever may still hear it, of a stream that did not say that it is whole."""
    return WeftError(Reason.CANCELLED, "the stream broke off before it said how much it has")
