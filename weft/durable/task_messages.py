"""Tasks as they travel, and back."""

from datetime import UTC, datetime

from google.protobuf.timestamp_pb2 import Timestamp

from weft.api.router.v1 import task_pb2, task_service_pb2
from weft.durable.tasks import Task, TaskAttempt, TaskChunk, TaskEvent, TaskFailure, TaskState
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason, reason_of

pb = task_service_pb2


def task_message(task: Task) -> task_pb2.Task:
    """A task as it travels."""
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
    """A task as it came. Raises INTERNAL for a state that this release does not know."""
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
    """An attempt as it travels."""
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
    """An attempt as it came."""
    return TaskAttempt(
        attempt=message.attempt,
        owner=message.owner,
        claimed_at=_moment(message.claim_time),
        ended_at=_moment(message.end_time) if message.HasField("end_time") else None,
        reason=reason_of(message.reason),
        message=message.message,
        receipt=message.receipt if message.HasField("receipt") else None,
    )


def event_message(news: TaskEvent) -> pb.WatchTaskResponse:
    """What is new as it travels."""
    if isinstance(news, Task):
        return pb.WatchTaskResponse(task=task_message(news))
    piece = task_pb2.TaskPiece(attempt=news.attempt, last_event=news.last_event, output=news.output)
    return pb.WatchTaskResponse(piece=piece)


def event_of(message: pb.WatchTaskResponse) -> TaskEvent | None:
    """What is new as it came; None: something that this release does not know."""
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
