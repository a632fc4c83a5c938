"""A response in the background: the same stream and the same document from what is kept of its task, whoever asks.

Nothing in them depends on when or how often they are made, or on how the answer was cut into pieces. Sequence numbers:
`response.created` is 0, `response.queued` 1, and the events of an attempt follow each other from
(attempt - 1) * ATTEMPT_STEP on, in the first attempt from 2 on. `response.in_progress` is the first of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from gateway.openai.sampling import wants_events
from gateway.responses.document import CANCELLED, FAILED, IN_PROGRESS, QUEUED, ResponseDocument, ResponseState
from gateway.responses.ids import background_response_id
from gateway.responses.payload import wants_logprobs
from gateway.responses.schema import ResponsesRequest
from gateway.responses.stream import ResponsesStream
from weft.api.common.v1 import event_pb2, warning_pb2
from weft.durable.tasks import Task, TaskState
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason

ATTEMPT_STEP = 1_000_000
"""Between the numbers of two attempts. An answer of more events than that can be resumed only until an attempt is
lost."""
_OPENING_EVENTS = 2
_ASK_AGAIN = "ask again without starting_after"


def first_number(attempt: int) -> int:
    """The sequence number of an attempt's `response.in_progress`."""
    return max(_OPENING_EVENTS, (attempt - 1) * ATTEMPT_STEP)


def attempt_of_number(number: int) -> int:
    """The attempt that a sequence number belongs to."""
    return number // ATTEMPT_STEP + 1


def has_content_until(number: int) -> bool:
    """Whether somebody who has the events up to this number may have been told of the answer."""
    return number > first_number(attempt_of_number(number))


def require_resumable(task: Task, starting_after: int) -> None:
    """Raises INVALID_ARGUMENT for events of an attempt that was lost, or that nobody can have been told of."""
    current = task.attempt + 1 if task.state is TaskState.PENDING else task.attempt
    asked = attempt_of_number(starting_after)
    if asked > max(1, current):
        raise invalid_field("starting_after", "is the number of no event of this response")
    if asked < current and has_content_until(starting_after):
        raise invalid_field("starting_after", f"is of an attempt that was lost; the answer began anew: {_ASK_AGAIN}")


def begun_anew() -> WeftError:
    """What a stream ends with whose caller has read content of an attempt that was lost."""
    return WeftError(Reason.WORKER_LOST, f"an attempt was lost and the answer starts again: {_ASK_AGAIN}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundRequest:
    """What a response in the background was asked for with."""

    asked: ResponsesRequest
    warnings: Sequence[warning_pb2.Warning] = ()
    """What the edge has to say beside the answer."""


class BackgroundDocument(ResponseDocument):
    """Renders the response of a task, whose times are the task's."""

    def __init__(self, asked: ResponsesRequest, task: Task, clock: Clock) -> None:
        super().__init__(
            asked, background_response_id(task.id), clock=clock, arrived=clock.monotonic(), created_at=task.created_at
        )
        self.ended_at: datetime | None = None
        """Of the task; must be known before the answer is concluded."""

    def _end(self) -> tuple[datetime, float]:
        ended_at = self.ended_at or self.created_at
        return ended_at, (ended_at - self.created_at).total_seconds()


class BackgroundStream(ResponsesStream):
    """One attempt at a response, as a stream. Its task is the one who keeps it, also where it failed."""

    _is_kept_where_it_failed = True

    def __init__(self, request: BackgroundRequest, task: Task, attempt: int, clock: Clock) -> None:
        asked = request.asked
        self._own_document = BackgroundDocument(asked, task, clock)
        state = ResponseState(model=asked.model, is_stored=True)
        events = wants_events(asked)
        super().__init__(self._own_document, state, logprobs=wants_logprobs(asked), include_events=events)
        self._warnings = [event_pb2.InferenceEvent(warning=warning) for warning in request.warnings]
        self._first_number = first_number(attempt)
        self._is_opened = True
        self.attempt = attempt

    @property
    def next_number(self) -> int:
        """The sequence number of the event that comes next."""
        return self._sequence

    @property
    def has_told(self) -> bool:
        """Whether anything of the answer has been told."""
        return self._sequence > self._first_number + 1

    def opening(self) -> bytes:
        """The events with which every response in the background begins."""
        response = self._render(QUEUED)
        return self._event(b"response.created", response) + self._event(b"response.queued", response)

    def begin(self) -> bytes:
        """The attempt has begun."""
        self._sequence = self._first_number
        return self._event(b"response.in_progress", self._render(IN_PROGRESS))

    def add(self, event: event_pb2.InferenceEvent) -> bytes:
        """The next event of the answer, which is not its end."""
        told = self.encode([event])
        if self._warnings and event.HasField("started"):
            told += self.encode(self._warnings)
        return told

    def complete(self, last: event_pb2.InferenceEvent | None, ended_at: datetime | None) -> bytes:
        """The task is completed; `last`: its last event. An answer that was none ends as a failure."""
        self._own_document.ended_at = ended_at
        try:
            told = b"" if last is None else self.encode([last])
        except WeftError as error:
            return self.failure(error)
        return told if self.is_done else self.failure(WeftError(Reason.INTERNAL, "the kept answer has no end"))

    def fail(self, error: WeftError, number: int) -> bytes:
        """The task has failed, or was cancelled. `number`: of the first event that tells so."""
        self._sequence = number
        return self.failure(error)

    def snapshot_of(self, state: TaskState) -> bytes:
        """The response as JSON, as it is while its task is in this state, or has become."""
        return self.snapshot(_STATUSES[state])


_STATUSES = {
    TaskState.PENDING: QUEUED,
    TaskState.RUNNING: IN_PROGRESS,
    TaskState.COMPLETED: FAILED,
    TaskState.FAILED: FAILED,
    TaskState.CANCELLED: CANCELLED,
}
"""Of a response that is not concluded: a task that is completed with an answer that is none has failed here."""


def events_after(data: bytes, first: int, starting_after: int) -> bytes:
    """The part of encoded events that comes after a sequence number. The first of them has the number `first`."""
    if first > starting_after:
        return data
    number, kept = first, []
    for block in data.split(b"\n\n")[:-1]:
        is_event = not block.startswith(b":")
        if number > starting_after:
            kept.append(block + b"\n\n")
        number += is_event
    return b"".join(kept)
