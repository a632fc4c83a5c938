"""One task of a publisher: a request on its way there, and the pieces of its answer on their way back."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from runner_svc.publishers.messages import Alive, Chunk, Failed, Piece, TaskRequest, Whole, new_task_id
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


class PublisherTask:
    """A task. One coroutine reads its answer; posts of the publisher write it, and wait while too much is unread."""

    def __init__(self, request: TaskRequest, max_waiting: int, now: float) -> None:
        self.id = new_task_id()
        self.request = request
        self.last_line = now
        """When the last line of its result arrived, or when it was made."""
        self.is_begun = False
        """Whether the publisher has sent anything for it."""
        self.received_bytes = 0
        self.failure: WeftError | None = None
        """Why it ended without a whole answer."""
        self._max_waiting = max_waiting
        self._pieces: deque[Chunk | Whole | Failed] = deque()
        self._is_complete = False
        self._changed = asyncio.Event()
        self._on_failure: list[Callable[[], None]] = []

    @property
    def waits_for_caller(self) -> bool:
        """Whether pieces of its answer are unread."""
        return bool(self._pieces)

    @property
    def has_ended(self) -> bool:
        """Whether nothing more is taken for it."""
        return self._is_complete or self.failure is not None

    @contextmanager
    def calling_on_failure(self, call: Callable[[], None]) -> Iterator[None]:
        """Calls `call` if the task fails within the block."""
        self._on_failure.append(call)
        try:
            yield
        finally:
            self._on_failure.remove(call)

    async def put(self, piece: Piece, now: float) -> None:
        """Takes a piece of the answer. Raises NOT_FOUND once the task has ended."""
        self.last_line, self.is_begun = now, True
        if not isinstance(piece, Alive):
            await self._until(lambda: self.has_ended or len(self._pieces) < self._max_waiting)
        self.require_open()
        if not isinstance(piece, Alive):
            self._pieces.append(piece)
            self._is_complete = not isinstance(piece, Chunk) or piece.done
            self._changed.set()

    async def next(self) -> Chunk | Whole | Failed:
        """Returns the next piece of the answer. Raises the failure of the task after the last one."""
        await self._until(lambda: bool(self._pieces) or self.failure is not None)
        if not self._pieces and self.failure is not None:
            raise self.failure
        piece = self._pieces.popleft()
        self._changed.set()
        return piece

    def fail(self, error: WeftError) -> None:
        """Ends the task, unless its answer is complete. Pieces that have arrived are read before the failure is."""
        if self.has_ended:
            return
        self.failure = error
        self._changed.set()
        for call in tuple(self._on_failure):
            call()

    def require_open(self) -> None:
        """Raises NOT_FOUND once the task has ended."""
        if self.has_ended:
            why = "its answer is complete" if self.failure is None else self.failure.message
            raise WeftError(Reason.NOT_FOUND, f"the task has ended: {why}")

    async def _until(self, is_true: Callable[[], bool]) -> None:
        while not is_true():
            self._changed.clear()
            await self._changed.wait()
