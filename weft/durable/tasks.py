"""Durable tasks: the port to the task store and its values.

A task is executed at least once and has exactly one terminal state. Every method takes the tenant: another tenant's
task is NOT_FOUND. Every method raises SERVICE_UNAVAILABLE when the store cannot be reached.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import IntEnum
from typing import Protocol

from google.protobuf.timestamp_pb2 import Timestamp

from weft.api.common.v1 import chat_pb2, completion_pb2, embedding_pb2, receipt_pb2
from weft.api.router.v1 import task_pb2, task_service_pb2
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason, reason_of

TASK_PREFIX = "task"
MAX_IDEMPOTENCY_KEY_CHARS = 255
MAX_ORIGIN_KIND_CHARS = 64
MAX_LISTED = 1_000
DEFAULT_LISTED = 100
_INDEX_BITS = 32

TaskPayload = chat_pb2.ChatPayload | completion_pb2.CompletionPayload | embedding_pb2.EmbeddingPayload


class TaskState(IntEnum):
    """The state of a task; numbers as in `router.v1.TaskState`. docs/tasks.md has the diagram."""

    PENDING = 1
    """It waits for a slot, or for a runner of its pool."""
    RUNNING = 2
    """A router has claimed it, and a runner works on it."""
    COMPLETED = 3
    FAILED = 4
    CANCELLED = 5

    @property
    def is_terminal(self) -> bool:
        """Whether it is final."""
        return self >= TaskState.COMPLETED


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFailure:
    """The failure of a task or of one attempt."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task. Times are UTC."""

    id: str
    tenant: str
    state: TaskState
    model: str
    """The requested target."""
    batch: str = ""
    """The batch that it is a line of; empty: none."""
    line: int = 0
    created_at: datetime
    started_at: datetime | None = None
    """Time of its last claim; None: never."""
    ended_at: datetime | None = None
    expires_at: datetime | None = None
    """Time at which it fails unless it has started by then; None while it runs and after its end."""
    attempt: int = 0
    """Number of started attempts."""
    max_attempts: int
    error: TaskFailure | None = None
    """The failure of a failed task."""
    last_event: int = 0
    """Number of the last stored event of its current attempt; 0: none."""
    waiting_for: str = ""
    """Known reason for waiting."""
    origin_kind: str = ""
    owner: str = ""
    """The router that has claimed it; empty unless it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskAttempt:
    """One attempt of a task."""

    attempt: int
    owner: str
    claimed_at: datetime
    ended_at: datetime | None = None
    reason: Reason = Reason.UNSPECIFIED
    message: str = ""
    receipt: receipt_pb2.Receipt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDetails:
    """A task with its spec and attempts."""

    task: Task
    spec: task_pb2.TaskSpec
    attempts: Sequence[TaskAttempt] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskChunk:
    """A stored chunk of an answer."""

    attempt: int
    last_event: int
    """Number of its last event; see `event_number`."""
    output: task_pb2.TaskOutput


TaskEvent = Task | TaskChunk


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTask:
    """A new task."""

    tenant: str
    spec: task_pb2.TaskSpec
    idempotency_key: str = ""
    """The same submission has the same key; empty: none."""
    caller: str = "local"
    """The caller for the log; see `RequestContext.caller`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """An acknowledgement: the task is on disk."""

    task: Task
    existed: bool = False
    """Whether it existed already, by its idempotency key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskQuery:
    """A filter and page of tasks."""

    states: frozenset[TaskState] = field(default_factory=frozenset)
    """Empty: all states."""
    model: str = ""
    """Empty: all models."""
    batch: str = ""
    """Empty: with any batch or none."""
    page_size: int = DEFAULT_LISTED
    page_token: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPage:
    """A page of tasks, the newest first."""

    tasks: Sequence[Task]
    next_page_token: str = ""
    """Empty: there is no further one."""
    notice: str = ""
    """A notice for operators about the task store; empty: none."""


class TaskPort(Protocol):
    """The task store and its execution."""

    async def submit(self, new: NewTask) -> Submitted:
        """Accepts a task; returns once it is durable.

        Raises INVALID_ARGUMENT naming the field, REQUEST_TOO_LARGE, IDEMPOTENCY_CONFLICT, TOO_MANY_RESOURCES at the
        tenant's limit.
        """
        ...

    async def get(self, tenant: str, task_id: str) -> Task:
        """Returns one task. Raises NOT_FOUND."""
        ...

    async def details(self, tenant: str, task_id: str) -> TaskDetails:
        """Returns one task with its spec and attempts. Raises NOT_FOUND."""
        ...

    async def list_page(self, tenant: str, query: TaskQuery) -> TaskPage:
        """Returns a page of tasks. Raises INVALID_ARGUMENT naming the field."""
        ...

    async def cancel(self, tenant: str, task_id: str) -> Task:
        """Cancels the task, with its backend where it runs; a finished one stays as it is. Raises NOT_FOUND."""
        ...

    async def delete(self, tenant: str, task_id: str) -> None:
        """Deletes a finished task. Raises NOT_FOUND, RESOURCE_IN_USE."""
        ...

    def watch(self, tenant: str, task_id: str, after_event: int = 0) -> AsyncGenerator[TaskEvent]:
        """Yields the task, every chunk after that event, and the task at each change; ends with the finished task.

        An event of a lost attempt counts as none. Raises NOT_FOUND, and TOO_MANY_RESOURCES at the limit of watches.
        """
        ...


def task_not_found(task_id: str) -> WeftError:
    """NOT_FOUND for a task that is unknown or another tenant's."""
    return WeftError(Reason.NOT_FOUND, f"no task {task_id} exists; finished tasks are deleted after a retention time")


def task_being_deleted() -> WeftError:
    """SERVICE_UNAVAILABLE for a submission whose idempotency key belongs to a task that is being deleted."""
    return WeftError(
        Reason.SERVICE_UNAVAILABLE, "the task of this idempotency key is just being deleted", retry_after_seconds=1
    )


def event_number(attempt: int, index: int) -> int:
    """Returns the number of an attempt's event, counted from 1. Numbers only increase, also over attempts."""
    return (attempt << _INDEX_BITS) | index


def attempt_of(number: int) -> int:
    """Returns the attempt of an event."""
    return number >> _INDEX_BITS


def index_of(number: int) -> int:
    """Returns the index of an event in its attempt, counted from 1."""
    return number & ((1 << _INDEX_BITS) - 1)


def payload_of(spec: task_pb2.TaskSpec) -> TaskPayload | None:
    """Returns the payload of a spec; None: of an unknown kind."""
    kind = spec.WhichOneof("payload")
    return None if kind is None else getattr(spec, kind)


pb = task_service_pb2


def task_message(task: Task) -> task_pb2.Task:
    """Converts a task to its message."""
    message = task_pb2.Task(
        id=task.id,
        tenant=task.tenant,
        state=task.state.value,  # type: ignore[arg-type]  # same numbers
        model=task.model,
        batch=task.batch,
        line=task.line,
        attempt=task.attempt,
        max_attempts=task.max_attempts,
        last_event=task.last_event,
        waiting_for=task.waiting_for,
        origin_kind=task.origin_kind,
        owner=task.owner,
    )
    message.create_time.FromDatetime(task.created_at)
    if task.started_at is not None:
        message.start_time.FromDatetime(task.started_at)
    if task.ended_at is not None:
        message.end_time.FromDatetime(task.ended_at)
    if task.expires_at is not None:
        message.expire_time.FromDatetime(task.expires_at)
    if task.error is not None:
        message.error.reason = task.error.reason.value  # type: ignore[assignment]  # same numbers
        message.error.message = task.error.message
    return message


def task_of(message: task_pb2.Task) -> Task:
    """Converts a message to a task. Raises INTERNAL for a state that this release does not know."""
    try:
        state = TaskState(message.state)
    except ValueError:
        raise WeftError(Reason.INTERNAL, "the router is of a newer release, whose tasks this one cannot read") from None
    error = message.error
    failure = TaskFailure(reason=reason_of(error.reason), message=error.message)
    return Task(
        id=message.id,
        tenant=message.tenant,
        state=state,
        model=message.model,
        batch=message.batch,
        line=message.line,
        created_at=message.create_time.ToDatetime(UTC),
        started_at=_moment(message.start_time) if message.HasField("start_time") else None,
        ended_at=_moment(message.end_time) if message.HasField("end_time") else None,
        expires_at=_moment(message.expire_time) if message.HasField("expire_time") else None,
        attempt=message.attempt,
        max_attempts=message.max_attempts,
        error=failure if message.HasField("error") else None,
        last_event=message.last_event,
        waiting_for=message.waiting_for,
        origin_kind=message.origin_kind,
        owner=message.owner,
    )


def attempt_message(attempt: TaskAttempt) -> task_pb2.TaskAttempt:
    """Converts an attempt to its message."""
    message = task_pb2.TaskAttempt(
        attempt=attempt.attempt,
        owner=attempt.owner,
        reason=attempt.reason.value,  # type: ignore[arg-type]  # same numbers
        message=attempt.message,
        receipt=attempt.receipt,
    )
    message.claim_time.FromDatetime(attempt.claimed_at)
    if attempt.ended_at is not None:
        message.end_time.FromDatetime(attempt.ended_at)
    return message


def attempt_of_message(message: task_pb2.TaskAttempt) -> TaskAttempt:
    """Converts a message to an attempt."""
    return TaskAttempt(
        attempt=message.attempt,
        owner=message.owner,
        claimed_at=_moment(message.claim_time),
        ended_at=_moment(message.end_time) if message.HasField("end_time") else None,
        reason=reason_of(message.reason),
        message=message.message,
        receipt=message.receipt if message.HasField("receipt") else None,
    )


def event_message(event: TaskEvent) -> pb.WatchTaskResponse:
    """Converts an event to its message."""
    if isinstance(event, Task):
        return pb.WatchTaskResponse(task=task_message(event))
    piece = task_pb2.TaskPiece(attempt=event.attempt, last_event=event.last_event, output=event.output)
    return pb.WatchTaskResponse(piece=piece)


def event_of(message: pb.WatchTaskResponse) -> TaskEvent | None:
    """Converts a message to an event; None: of an unknown kind."""
    match message.WhichOneof("news"):
        case "task":
            return task_of(message.task)
        case "piece":
            piece = message.piece
            return TaskChunk(attempt=piece.attempt, last_event=piece.last_event, output=piece.output)
        case _:
            return None


def _moment(stamp: Timestamp) -> datetime:
    return stamp.ToDatetime(UTC)
