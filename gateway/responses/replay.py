"""From what is told of a task to the events of its response, and to the response as it is. Pure."""

from typing import TYPE_CHECKING

from gateway.responses.background_answer import (
    BackgroundRequest,
    BackgroundStream,
    attempt_of_number,
    begun_anew,
    events_after,
    first_number,
    has_content_until,
)
from weft.durable.tasks import Task, TaskChunk, TaskEvent, TaskState
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

if TYPE_CHECKING:
    from weft.api.common.v1 import event_pb2

FROM_THE_START = -1


class Replay:
    """Takes in what a watch says from the first event on, and gives the events after a sequence number."""

    def __init__(
        self, request: BackgroundRequest, task: Task, clock: Clock, *, starting_after: int = FROM_THE_START
    ) -> None:
        """`starting_after`: checked by `require_resumable`."""
        self._request = request
        self._clock = clock
        self._after = starting_after
        self._stream = BackgroundStream(request, task, max(1, task.attempt), clock)
        self._is_begun = False
        self._seen = 0
        self._last: event_pb2.InferenceEvent | None = None
        self.task = task
        """As it was told of last."""
        self.last_number = max(0, starting_after)
        """Of the events that the caller has, once it has those that were given."""
        self.is_done = False
        """Whether the response's last event has been given."""

    @property
    def is_current(self) -> bool:
        """Whether everything is taken in that is kept of the task as it is."""
        waits = self.task.state is TaskState.PENDING
        return self.is_done or waits or (not self.task.state.is_terminal and self._seen >= self.task.last_event)

    def opening(self) -> bytes:
        """The first events of every response."""
        return self._given(0, self._stream.opening())

    def take(self, news: TaskEvent) -> bytes:
        """What is new. Raises WORKER_LOST where an attempt was lost of which the caller has been told."""
        if isinstance(news, TaskChunk):
            return self._reach(news.attempt) + self._take_piece(news)
        self.task = news
        told = b""
        if news.attempt and news.state is not TaskState.PENDING:
            told = self._reach(news.attempt)
        elif not news.state.is_terminal:
            self._require_not_anew(news.attempt + 1)
        if news.state.is_terminal and self._seen >= news.last_event:
            told += self.end()
        return told

    def end(self) -> bytes:
        """The task's end, once all of it that is kept has been taken in; nothing where that was told already.

        Nothing as well where a part of a whole answer is missing: it was forgotten while it was read.
        """
        if self.is_done or not self.task.state.is_terminal:
            return b""
        if self.task.state is TaskState.COMPLETED and self._seen < self.task.last_event:
            return b""
        self.is_done = True
        stream, task = self._stream, self.task
        first = max(stream.next_number, first_number(1))
        if task.state is TaskState.COMPLETED:
            return self._given(first, stream.complete(self._last, task.ended_at))
        if self._after > first + 1:
            # Less is kept than the caller has: what it must not miss is the end.
            first = self._after + 1
        return self._given(first, stream.fail(_failure(task), first))

    def snapshot(self) -> bytes:
        """The response as it is, as JSON."""
        return self._stream.snapshot_of(self.task.state)

    def _reach(self, attempt: int) -> bytes:
        if self._is_begun and attempt == self._stream.attempt:
            return b""
        self._require_not_anew(attempt)
        self._stream = BackgroundStream(self._request, self.task, attempt, self._clock)
        self._is_begun, self._seen, self._last = True, 0, None
        return self._given(first_number(attempt), self._stream.begin())

    def _require_not_anew(self, attempt: int) -> None:
        """Another attempt is next: whoever has been told of the answer cannot be told more of it."""
        is_of_another = attempt_of_number(max(0, self._after)) < attempt
        if (self._is_begun and self._stream.has_told) or (is_of_another and has_content_until(self._after)):
            raise begun_anew()

    def _take_piece(self, piece: TaskChunk) -> bytes:
        if piece.last_event <= self._seen:
            return b""
        told = []
        for event in piece.output.events:
            if event.HasField("finished"):
                # Not before the task is at its end: until then the attempt may be lost, and its times are not known.
                self._last = event
            else:
                first = self._stream.next_number
                told.append(self._given(first, self._stream.add(event)))
        self._seen = piece.last_event
        if self.task.state.is_terminal and self._seen >= self.task.last_event:
            told.append(self.end())
        return b"".join(told)

    def _given(self, first: int, data: bytes) -> bytes:
        given = events_after(data, first, self._after)
        self.last_number = max(self.last_number, self._stream.next_number - 1)
        return given


def _failure(task: Task) -> WeftError:
    if task.state is TaskState.CANCELLED:
        return WeftError(Reason.CANCELLED, "the response was cancelled")
    if task.error is None:
        return WeftError(Reason.INTERNAL, "the task failed")
    return WeftError(task.error.reason, task.error.message)
