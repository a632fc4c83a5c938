"""Uploads: client streams of files and batches that are stored completely or not at all."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import TypeVar

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.services.service_lifecycle import start_task, stop_tasks
from weft.kernel.telemetry.log import get_logger

UPLOAD_LIMIT_SECONDS = 3_600.0
"""Maximum duration of an upload; a sweep removes incomplete ones that started earlier."""
RETRY_SECONDS = 5.0

log = get_logger("weft.router")


class Uploads:
    """The uploads of a kind in progress, at most `most`."""

    def __init__(self, kind: str, most: int) -> None:
        self._kind = kind
        self._most = most
        self._under_way = 0
        self._removals: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def slot(self, undo: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
        """Context of an upload. `undo` removes it if the block fails, even if the caller is cancelled.

        Raises TOO_MANY_RESOURCES if too many are in progress.
        """
        if self._under_way >= self._most:
            raise WeftError(
                Reason.TOO_MANY_RESOURCES,
                f"{self._most} {self._kind} are being uploaded, which is the limit; retry later",
                retry_after_seconds=RETRY_SECONDS,
            )
        self._under_way += 1
        try:
            yield
        except BaseException:
            removal = start_task(self._undo(undo), name=f"undo-{self._kind}")
            self._removals.add(removal)
            removal.add_done_callback(self._removals.discard)
            await asyncio.shield(removal)
            raise
        finally:
            self._under_way -= 1

    async def stop(self, grace_seconds: float) -> None:
        """Waits for removals in progress within the grace period; a sweep does the rest."""
        if self._removals:
            await asyncio.wait(self._removals, timeout=grace_seconds)
        await stop_tasks(self._removals)

    async def _undo(self, undo: Callable[[], Awaitable[None]]) -> None:
        try:
            await undo()
        except WeftError as error:
            # The rest is invisible, and a sweep removes it.
            log.error("incomplete upload was not removed", kind=self._kind, reason=error.reason.name)  # noqa: TRY400


def upload_timed_out(kind: str) -> WeftError:
    """Returns the error of an upload that a sweep has removed."""
    return WeftError(
        Reason.DEADLINE_EXCEEDED,
        f"the {kind} was not complete within {UPLOAD_LIMIT_SECONDS:.0f} seconds; send it again",
    )


IDLE_SECONDS = 60.0
"""Maximum time that a client may send nothing."""

MessageT = TypeVar("MessageT")


async def _with_idle_timeout(messages: AsyncIterator[MessageT], *, idle_seconds: float) -> AsyncGenerator[MessageT]:
    """Yields every message. Raises DEADLINE_EXCEEDED if none arrives for `idle_seconds`."""
    while True:
        try:
            async with asyncio.timeout(idle_seconds):
                message = await anext(messages)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise WeftError(
                Reason.DEADLINE_EXCEEDED, f"the client sent nothing for {idle_seconds:g} seconds"
            ) from error
        yield message


@asynccontextmanager
async def received(
    messages: AsyncIterator[MessageT], *, idle_seconds: float
) -> AsyncGenerator[tuple[MessageT, AsyncGenerator[MessageT]]]:
    """Yields the first message of an upload, and the others.

    Raises DEADLINE_EXCEEDED if no message arrives for `idle_seconds`, CANCELLED if there is none.
    """
    async with aclosing(_with_idle_timeout(aiter(messages), idle_seconds=idle_seconds)) as others:
        first = await anext(others, None)
        if first is None:
            raise incomplete_stream()
        yield first, others


def incomplete_stream() -> WeftError:
    """Returns the error of a stream that ended without its length."""
    return WeftError(Reason.CANCELLED, "the stream ended before it stated its length")
