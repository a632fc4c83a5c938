"""What a running attempt has said: collected, numbered, and written piece by piece."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from router_svc.tasks.config import TaskLimits
from router_svc.tasks.store_port import NewPiece
from weft.api.common.v1 import event_pb2
from weft.api.router.v1 import task_pb2
from weft.dispatch.frames import has_content
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

_NOT_KEPT = frozenset({"queued", "loading", "progress", None})
"""Waiting and progress are of the moment, and of kinds that are not known nothing can be made later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingParts:
    """What a recording works with."""

    limits: TaskLimits
    clock: Clock
    is_watched: Callable[[], bool]
    write: Callable[[Sequence[NewPiece]], Awaitable[None]]
    """Returns once they are on disk; raises where they never will be."""


class Recording:
    """The answer of one attempt. Its runner waits while a part of it is being written."""

    def __init__(self, parts: RecordingParts) -> None:
        self._parts = parts
        self._turn = asyncio.Lock()
        self._waiting: list[event_pb2.InferenceEvent] = []
        self._embeddings: task_pb2.TaskOutput | None = None
        self._waiting_bytes = 0
        self._written = 0
        """Events that are on disk."""
        self._bytes = 0
        """Of everything so far."""
        self._has_content = False
        self._is_over = False
        """Whether the runner has said its last word."""
        self._has_more = asyncio.Event()

    async def add(self, output: task_pb2.TaskOutput) -> None:
        """Take what the runner says. Raises REQUEST_TOO_LARGE for an answer that is longer than may be kept."""
        async with self._turn:
            kept = [event for event in output.events if event.WhichOneof("event") not in _NOT_KEPT]
            if not kept:
                return
            self._take(kept, output)
            is_first = not self._has_content and has_content(kept)
            self._has_content = self._has_content or is_first
            # What ends an answer is committed together with the end.
            if kept[-1].WhichOneof("event") == "finished":
                self._is_over = True
                return
            if self._waiting_bytes >= self._parts.limits.max_piece_bytes or (is_first and self._parts.is_watched()):
                await self._write()
            else:
                self._has_more.set()

    async def keep_writing(self) -> None:
        """Write what has been said a moment ago, until cancelled: a runner that pauses keeps nothing back."""
        limits = self._parts.limits
        while True:
            await self._has_more.wait()
            watched = self._parts.is_watched()
            await self._parts.clock.sleep(
                limits.watched_piece_interval_seconds if watched else limits.piece_interval_seconds
            )
            async with self._turn:
                self._has_more.clear()
                if not self._is_over:
                    await self._write()

    async def rest(self) -> Sequence[NewPiece]:
        """What is not on disk yet, once nothing is being written."""
        async with self._turn:
            self._has_more.clear()
            return self._pieces()

    def _take(self, events: list[event_pb2.InferenceEvent], output: task_pb2.TaskOutput) -> None:
        size = output.ByteSize()
        self._bytes += size
        limit = self._parts.limits.max_result_bytes
        if self._bytes > limit:
            raise WeftError(
                Reason.REQUEST_TOO_LARGE,
                f"the answer has more than {limit} bytes (router.tasks.max_result_bytes); ask for less in one task",
            )
        self._waiting += events
        self._waiting_bytes += size
        if output.embeddings:
            self._embeddings = output

    async def _write(self) -> None:
        pieces = self._pieces()
        if not pieces:
            return
        await self._parts.write(pieces)
        self._written += len(self._waiting)
        self._waiting.clear()
        self._waiting_bytes = 0

    def _pieces(self) -> list[NewPiece]:
        """What waits, cut where a piece has what it may have; an event is never cut."""
        if self._embeddings is not None:
            return [NewPiece(first_index=1, event_count=1, output=self._embeddings.SerializeToString())]
        pieces: list[NewPiece] = []
        first = 0
        size = 0
        for place, event in enumerate(self._waiting):
            length = event.ByteSize()
            if place > first and size + length > self._parts.limits.max_piece_bytes:
                pieces.append(self._piece(first, place))
                first, size = place, 0
            size += length
        if first < len(self._waiting):
            pieces.append(self._piece(first, len(self._waiting)))
        return pieces

    def _piece(self, first: int, end: int) -> NewPiece:
        return NewPiece(
            first_index=self._written + first + 1,
            event_count=end - first,
            output=task_pb2.TaskOutput(events=self._waiting[first:end]).SerializeToString(),
        )
