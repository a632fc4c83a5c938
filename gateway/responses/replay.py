"""Replay of a background response: converts a task's events to the response's events and state. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from gateway.answers.compaction import Summary
from gateway.gateway_config import ResponseEnvelope
from gateway.openai.sampling import wants_events
from gateway.responses.compaction_items import SummaryItems
from gateway.responses.document import CANCELLED, FAILED, IN_PROGRESS, QUEUED, ResponseDocument
from gateway.responses.response_stream import ResponsesStream
from gateway.responses.schema import InputItem, ResponsesRequest
from weft.api.common.v1 import event_pb2, warning_pb2
from weft.api.router.v1 import task_pb2, task_service_pb2
from weft.durable.responses import background_response_id
from weft.durable.tasks import failure_of, is_terminal
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import Clock
from weft.kernel.time.timestamps import datetime_of, optional_datetime

ATTEMPT_STEP = 1_000_000
"""Distance between the first sequence numbers of two attempts. A longer answer can be resumed only until an attempt is
lost."""
_OPENING_EVENTS = 2
_ASK_AGAIN = "repeat the request without starting_after"


def first_number(attempt: int) -> int:
    """Returns the sequence number of an attempt's `response.in_progress`."""
    return max(_OPENING_EVENTS, (attempt - 1) * ATTEMPT_STEP)


def attempt_of_number(number: int) -> int:
    """Returns the attempt that a sequence number belongs to."""
    return number // ATTEMPT_STEP + 1


def has_content_until(number: int) -> bool:
    """Whether events up to this number may include content of the answer."""
    return number > first_number(attempt_of_number(number))


def require_resumable(task: task_pb2.Task, starting_after: int) -> None:
    """Raises INVALID_ARGUMENT for events of a lost attempt, and for events that were never sent."""
    current = task.attempt + 1 if task.state == task_pb2.TASK_STATE_PENDING else task.attempt
    params = attempt_of_number(starting_after)
    if params > max(1, current):
        raise invalid_field("starting_after", "is not the number of an event of this response")
    if params < current and has_content_until(starting_after):
        raise invalid_field("starting_after", f"belongs to a lost attempt; the answer was restarted: {_ASK_AGAIN}")


def restarted_answer() -> WeftError:
    """Returns the error of a stream whose caller has read content of a lost attempt."""
    return WeftError(Reason.WORKER_LOST, f"an attempt was lost and the answer restarts: {_ASK_AGAIN}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundRequest:
    """The request of a background response."""

    params: ResponsesRequest
    items: Sequence[InputItem] = ()
    """Its input, with resolved references."""
    warnings: Sequence[warning_pb2.Warning] = ()
    """The gateway's warnings."""
    envelope: ResponseEnvelope = ResponseEnvelope.OPENAI
    """The form of the response if the request names none."""
    seal: Callable[[Summary], str] | None = None
    """Seals the answer, which is a summary; None: it is an answer."""


def task_document(
    params: ResponsesRequest, task: task_pb2.Task, clock: Clock, *, is_stored: bool, envelope: ResponseEnvelope
) -> ResponseDocument:
    """Returns the response of a task, with the task's times; `envelope`: its form if `params` name none."""
    response_id = background_response_id(task.id)
    created_at = datetime_of(task.create_time)
    return ResponseDocument(
        params, response_id, clock=clock, is_stored=is_stored, created_at=created_at, envelope=envelope
    )


class BackgroundStream(ResponsesStream):
    """One attempt at a response, as a stream."""

    def __init__(self, request: BackgroundRequest, task: task_pb2.Task, attempt: int, clock: Clock) -> None:
        params = request.params
        document = task_document(params, task, clock, is_stored=True, envelope=request.envelope)
        if request.seal is not None:
            document.items = SummaryItems(document.response_id, request.seal)
        super().__init__(document, include_events=wants_events(params))
        self._warnings = [event_pb2.InferenceEvent(warning=warning) for warning in request.warnings]
        self._first_number = first_number(attempt)
        self._is_opened = True
        self.attempt = attempt

    @property
    def next_number(self) -> int:
        """Returns the sequence number of the next event."""
        return self._sequence

    @property
    def has_sent(self) -> bool:
        """Whether content of the answer has been sent."""
        return self._sequence > self._first_number + 1

    def opening(self) -> bytes:
        """Returns the opening events of every background response."""
        response = self.snapshot(QUEUED)
        return self._event(b"response.created", response) + self._event(b"response.queued", response)

    def begin(self) -> bytes:
        """Encodes the beginning of the attempt."""
        self._sequence = self._first_number
        return self._event(b"response.in_progress", self.snapshot())

    def add(self, event: event_pb2.InferenceEvent) -> bytes:
        """Encodes an event of the answer, except its last."""
        data = self.encode([event])
        if self._warnings and event.HasField("started"):
            data += self.encode(self._warnings)
        return data

    def complete(self, last: event_pb2.InferenceEvent | None, ended_at: datetime | None) -> bytes:
        """Encodes the end of a completed task; `last`: its last event. An invalid answer ends as a failure."""
        self.document.ended_at = ended_at
        try:
            data = b"" if last is None else self.encode([last])
        except WeftError as error:
            return self.failure(error)
        return data if self.is_done else self.failure(WeftError(Reason.INTERNAL, "the stored answer has no end"))

    def fail(self, error: WeftError, number: int) -> bytes:
        """Encodes the failure or cancellation of the task. `number`: sequence number of its first event."""
        self._sequence = number
        return self.failure(error)


_STATUSES = {
    task_pb2.TASK_STATE_PENDING: QUEUED,
    task_pb2.TASK_STATE_RUNNING: IN_PROGRESS,
    task_pb2.TASK_STATE_COMPLETED: FAILED,
    task_pb2.TASK_STATE_FAILED: FAILED,
    task_pb2.TASK_STATE_CANCELLED: CANCELLED,
}
"""Statuses of responses that are not concluded. A completed task without a valid answer counts as failed."""


def events_after(data: bytes, first: int, starting_after: int) -> bytes:
    """Returns the encoded events after a sequence number; `first`: the number of the first one."""
    if first > starting_after:
        return data
    number, kept = first, []
    for block in data.split(b"\n\n")[:-1]:
        is_event = not block.startswith(b":")
        if number > starting_after:
            kept.append(block + b"\n\n")
        number += is_event
    return b"".join(kept)


FROM_THE_START = -1


class Replay:
    """Consumes a task's watch from its first event; returns the response's events after a sequence number."""

    def __init__(
        self, request: BackgroundRequest, task: task_pb2.Task, clock: Clock, *, starting_after: int = FROM_THE_START
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
        """The task as last seen."""
        self.last_number = max(0, starting_after)
        """Sequence number of the last event produced so far."""
        self.is_done = False
        """Whether the response's last event has been produced."""

    @property
    def is_current(self) -> bool:
        """Whether all stored output of the task has been consumed."""
        waits = self.task.state == task_pb2.TASK_STATE_PENDING
        return self.is_done or waits or (not is_terminal(self.task) and self._seen >= self.task.last_event)

    def opening(self) -> bytes:
        """Returns the opening events of every response."""
        return self._given(0, self._stream.opening())

    def take(self, event: task_service_pb2.WatchTaskResponse) -> bytes:
        """Returns the new events. Raises WORKER_LOST if an attempt was lost after its content was sent."""
        if event.HasField("piece"):
            return self._reach(event.piece.attempt) + self._take_piece(event.piece)
        task = self.task = event.task
        data = b""
        if task.attempt and task.state != task_pb2.TASK_STATE_PENDING:
            data = self._reach(task.attempt)
        elif not is_terminal(task):
            self._require_not_anew(task.attempt + 1)
        if is_terminal(task) and self._seen >= task.last_event:
            data += self.end()
        return data

    def end(self) -> bytes:
        """Returns the last events once all stored output has been consumed; empty if they have been returned.

        Also empty if a part of a complete answer is missing because it was deleted while being read.
        """
        if self.is_done or not is_terminal(self.task):
            return b""
        if self.task.state == task_pb2.TASK_STATE_COMPLETED and self._seen < self.task.last_event:
            return b""
        self.is_done = True
        stream, task = self._stream, self.task
        first = max(stream.next_number, first_number(1))
        if task.state == task_pb2.TASK_STATE_COMPLETED:
            return self._given(first, stream.complete(self._last, optional_datetime(task, "end_time")))
        if self._after > first + 1:
            # The store has fewer events than the caller, so send the end.
            first = self._after + 1
        return self._given(first, stream.fail(_failure(task), first))

    def snapshot(self) -> bytes:
        """Returns the current response as JSON."""
        return self._stream.snapshot(_STATUSES[self.task.state])

    def _reach(self, attempt: int) -> bytes:
        if self._is_begun and attempt == self._stream.attempt:
            return b""
        self._require_not_anew(attempt)
        self._stream = BackgroundStream(self._request, self.task, attempt, self._clock)
        self._is_begun, self._seen, self._last = True, 0, None
        return self._given(first_number(attempt), self._stream.begin())

    def _require_not_anew(self, attempt: int) -> None:
        """Raises WORKER_LOST if another attempt begins after content was sent."""
        is_of_another = attempt_of_number(max(0, self._after)) < attempt
        if (self._is_begun and self._stream.has_sent) or (is_of_another and has_content_until(self._after)):
            raise restarted_answer()

    def _take_piece(self, piece: task_pb2.TaskPiece) -> bytes:
        if piece.last_event <= self._seen:
            return b""
        data = []
        for event in piece.output.events:
            if event.HasField("finished"):
                # Kept until the task has ended: before that the attempt may be lost, and its times are unknown.
                self._last = event
            else:
                first = self._stream.next_number
                data.append(self._given(first, self._stream.add(event)))
        self._seen = piece.last_event
        if is_terminal(self.task) and self._seen >= self.task.last_event:
            data.append(self.end())
        return b"".join(data)

    def _given(self, first: int, data: bytes) -> bytes:
        given = events_after(data, first, self._after)
        self.last_number = max(self.last_number, self._stream.next_number - 1)
        return given


def _failure(task: task_pb2.Task) -> WeftError:
    if task.state == task_pb2.TASK_STATE_CANCELLED:
        return WeftError(Reason.CANCELLED, "the response was cancelled")
    return failure_of(task) or WeftError(Reason.INTERNAL, "the task failed")
