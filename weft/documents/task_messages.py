"""From the messages of the wire to the documents of tasks."""

from datetime import UTC
from typing import Any, cast

from weft.api.router.v1 import task_pb2, task_service_pb2
from weft.documents.request_messages import enum_word, moment, reason_word, receipt_document
from weft.documents.task_documents import TaskAttemptDocument, TaskDocument, TaskErrorDocument


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
