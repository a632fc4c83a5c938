"""Requests that outlive their callers: the port of whoever runs them, and its values.

A task is executed at least once and has exactly one terminal state. Whoever asks names the tenant: another tenant's
task is NOT_FOUND. Every method raises SERVICE_UNAVAILABLE when whoever keeps the tasks cannot be reached.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import IntEnum
from typing import Protocol

from weft.api.common.v1 import chat_pb2, completion_pb2, embedding_pb2, receipt_pb2
from weft.api.router.v1 import task_pb2
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

TASK_PREFIX = "task"
MAX_IDEMPOTENCY_KEY_CHARS = 255
MAX_ORIGIN_KIND_CHARS = 64
MAX_LISTED = 1_000
DEFAULT_LISTED = 100
_INDEX_BITS = 32

TaskPayload = chat_pb2.ChatPayload | completion_pb2.CompletionPayload | embedding_pb2.EmbeddingPayload


class TaskState(IntEnum):
    """Where a task is in its life; numbers as in `router.v1.TaskState`. docs/tasks.md has the diagram."""

    PENDING = 1
    """It waits for a slot, or for its pool to have a runner at all."""
    RUNNING = 2
    """A router has claimed it, and a runner works on it."""
    COMPLETED = 3
    FAILED = 4
    CANCELLED = 5

    @property
    def is_terminal(self) -> bool:
        """Whether nothing leaves it."""
        return self >= TaskState.COMPLETED


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFailure:
    """Why a task, or an attempt of it, came to nothing."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task as it is. Times are UTC."""

    id: str
    tenant: str
    state: TaskState
    model: str
    """As it was asked for."""
    batch: str = ""
    """The batch that it is a line of; empty: none."""
    line: int = 0
    created_at: datetime
    started_at: datetime | None = None
    """When it was claimed last; None: never."""
    ended_at: datetime | None = None
    expires_at: datetime | None = None
    """When it fails unless it has been begun by then; None while it runs, and at its end."""
    attempt: int = 0
    """How often it was begun."""
    max_attempts: int
    error: TaskFailure | None = None
    """Why it failed."""
    last_event: int = 0
    """Number of the last event that is kept of its current attempt; 0: none."""
    waiting_for: str = ""
    """What is known of why it waits."""
    origin_kind: str = ""
    owner: str = ""
    """The router that has claimed it; empty unless it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskAttempt:
    """One time that a task was begun."""

    attempt: int
    owner: str
    claimed_at: datetime
    ended_at: datetime | None = None
    reason: Reason = Reason.UNSPECIFIED
    message: str = ""
    receipt: receipt_pb2.Receipt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDetails:
    """A task, what is to be done, and what was tried."""

    task: Task
    spec: task_pb2.TaskSpec
    attempts: Sequence[TaskAttempt] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskChunk:
    """A piece of an answer that is on disk."""

    attempt: int
    last_event: int
    """Number of its last event; see `event_number`."""
    output: task_pb2.TaskOutput


TaskEvent = Task | TaskChunk


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTask:
    """What is to be done, and for whom."""

    tenant: str
    spec: task_pb2.TaskSpec
    idempotency_key: str = ""
    """The same submission has the same key; empty: none."""
    caller: str = "local"
    """Who sends it, for the log; see `RequestContext.caller`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """An acknowledgement: the task is on disk."""

    task: Task
    existed: bool = False
    """Whether it was there already, by its idempotency key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskQuery:
    """Which tasks."""

    states: frozenset[TaskState] = field(default_factory=frozenset)
    """Empty: of all states."""
    model: str = ""
    """Empty: for all."""
    batch: str = ""
    """Empty: of any, and of none."""
    page_size: int = DEFAULT_LISTED
    page_token: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPage:
    """Some tasks, the newest first."""

    tasks: Sequence[Task]
    next_page_token: str = ""
    """Empty: there is no further one."""
    notice: str = ""
    """What whoever looks after the mesh must know of whoever keeps the tasks; empty: nothing."""


class TaskPort(Protocol):
    """Who runs tasks."""

    async def submit(self, new: NewTask) -> Submitted:
        """Accept a task; return once it is durable.

        Raises INVALID_ARGUMENT naming the field, REQUEST_TOO_LARGE, IDEMPOTENCY_CONFLICT, TOO_MANY_RESOURCES where the
        tenant has as many as it may.
        """
        ...

    async def get(self, tenant: str, task_id: str) -> Task:
        """One task. Raises NOT_FOUND."""
        ...

    async def details(self, tenant: str, task_id: str) -> TaskDetails:
        """One task with what is to be done and its attempts. Raises NOT_FOUND."""
        ...

    async def list_page(self, tenant: str, query: TaskQuery) -> TaskPage:
        """Some tasks. Raises INVALID_ARGUMENT naming the field."""
        ...

    async def cancel(self, tenant: str, task_id: str) -> Task:
        """End it, with its backend where it runs; one at its end stays as it is. Raises NOT_FOUND."""
        ...

    async def delete(self, tenant: str, task_id: str) -> None:
        """Forget one that is at its end. Raises NOT_FOUND, RESOURCE_IN_USE."""
        ...

    def watch(self, tenant: str, task_id: str, after_event: int = 0) -> AsyncGenerator[TaskEvent]:
        """The task as it is, every piece after that event, the task at each change; ends with the task at its end.

        An event of an attempt that was lost counts as none. Raises NOT_FOUND, TOO_MANY_RESOURCES where as many watch as
        may.
        """
        ...


def task_not_found(task_id: str) -> WeftError:
    """What is said of a task that nobody keeps, or that is another tenant's."""
    return WeftError(Reason.NOT_FOUND, f"no task {task_id} is kept; tasks are forgotten some time after their end")


def task_being_deleted() -> WeftError:
    """What a submission is told whose idempotency key is that of a task that is forgotten meanwhile."""
    return WeftError(
        Reason.SERVICE_UNAVAILABLE, "the task of this idempotency key is just being deleted", retry_after_seconds=1
    )


def event_number(attempt: int, index: int) -> int:
    """The number of an attempt's event, counted from 1. Numbers only ever rise, over attempts too."""
    return (attempt << _INDEX_BITS) | index


def attempt_of(number: int) -> int:
    """The attempt that an event belongs to."""
    return number >> _INDEX_BITS


def index_of(number: int) -> int:
    """Which event of its attempt, counted from 1."""
    return number & ((1 << _INDEX_BITS) - 1)


def payload_of(spec: task_pb2.TaskSpec) -> TaskPayload | None:
    """What is asked; None: nothing that this version knows."""
    kind = spec.WhichOneof("payload")
    return None if kind is None else getattr(spec, kind)
