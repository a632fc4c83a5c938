"""Durable tasks as documents: what commands print with -o json."""

from datetime import UTC, datetime
from typing import Any, Literal, cast

from weft.api.router.v1 import task_pb2, task_service_pb2
from weft.documents.document_base import DocumentPart
from weft.documents.request_documents import ReceiptDocument, enum_word, moment, reason_word, receipt_document

TaskStateWord = Literal["pending", "running", "completed", "failed", "cancelled", "unknown"]


class TaskErrorDocument(DocumentPart):
    """Why something came to nothing."""

    reason: str
    """From the one list of reasons."""
    message: str
    """The same in words."""


class TaskAttemptDocument(DocumentPart):
    """One time that a task was begun."""

    attempt: int
    """Counted from 1."""
    owner: str
    """The router that claimed it."""
    claimed_at: datetime
    """When it was claimed."""
    ended_at: datetime | None = None
    """When it ended; absent: it runs."""
    error: TaskErrorDocument | None = None
    """Why it came to nothing; absent while it runs, and for the one that completed."""
    receipt: ReceiptDocument | None = None
    """What happened, as far as it is known."""


class TaskDocument(DocumentPart):
    """A request that outlives its caller."""

    kind: Literal["task"]
    """What it is."""
    id: str
    """Its id, which is also the request id of every attempt."""
    tenant: str
    """Whose it is."""
    state: TaskStateWord
    """Where it is in its life."""
    model: str
    """What was asked for: a model, a pool, "route/" and a route, or "agent/" and an agent."""
    batch: str | None = None
    """The batch that it is a line of."""
    line: int | None = None
    """Which line, counted from 0."""
    created_at: datetime
    """When it was acknowledged."""
    started_at: datetime | None = None
    """When it was claimed last."""
    ended_at: datetime | None = None
    """When it reached its end."""
    expires_at: datetime | None = None
    """When it fails unless it has been begun by then."""
    attempt: int
    """How often it was begun."""
    max_attempts: int
    """How many attempts may come to nothing."""
    error: TaskErrorDocument | None = None
    """Why it failed."""
    waiting_for: str | None = None
    """What is known of why it waits."""
    origin_kind: str | None = None
    """The API in whose words it was submitted."""
    owner: str | None = None
    """The router that has claimed it, while it runs."""
    last_event: int = 0
    """Number of the last event that is kept of its current attempt; 0: none."""
    attempts: tuple[TaskAttemptDocument, ...] = ()
    """Every attempt in order, where one task was asked for."""

    @property
    def is_over(self) -> bool:
        """Whether it is at its end."""
        return self.state in {"completed", "failed", "cancelled"}


class TaskList(DocumentPart):
    """Tasks, the newest first."""

    kind: Literal["TaskList"]
    """What it is."""
    items: tuple[TaskDocument, ...]
    """The tasks, without their attempts."""
    notice: str | None = None
    """What whoever looks after the mesh must know of whoever keeps the tasks."""


def task_document(task: task_pb2.Task, attempts: tuple[TaskAttemptDocument, ...] = ()) -> TaskDocument:
    """One task."""
    return TaskDocument(
        kind="task",
        id=task.id,
        tenant=task.tenant,
        state=cast("Any", enum_word(task_pb2.TaskState, task.state, "TASK_STATE_")),
        model=task.model,
        batch=task.batch or None,
        line=task.line if task.batch else None,
        created_at=task.create_time.ToDatetime(tzinfo=UTC),
        started_at=moment(task, "start_time"),
        ended_at=moment(task, "end_time"),
        expires_at=moment(task, "expire_time"),
        attempt=task.attempt,
        max_attempts=task.max_attempts,
        error=_error(task.error.reason, task.error.message) if task.HasField("error") else None,
        waiting_for=task.waiting_for or None,
        origin_kind=task.origin_kind or None,
        owner=task.owner or None,
        last_event=task.last_event,
        attempts=attempts,
    )


def task_details(found: task_service_pb2.GetTaskResponse) -> TaskDocument:
    """One task with its attempts."""
    return task_document(found.task, tuple(map(_attempt, found.attempts)))


def _attempt(attempt: task_pb2.TaskAttempt) -> TaskAttemptDocument:
    return TaskAttemptDocument(
        attempt=attempt.attempt,
        owner=attempt.owner,
        claimed_at=attempt.claim_time.ToDatetime(tzinfo=UTC),
        ended_at=moment(attempt, "end_time"),
        error=_error(attempt.reason, attempt.message) if attempt.reason else None,
        receipt=receipt_document(attempt.receipt) if attempt.HasField("receipt") else None,
    )


def _error(reason: int, message: str) -> TaskErrorDocument:
    return TaskErrorDocument(reason=reason_word(reason) or "unknown", message=message)
