"""Messages for tests: copies with changed fields, watch events, and batch counts."""

from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import Message

from weft.api.router.v1 import batch_service_pb2, task_pb2, task_service_pb2

MessageT = TypeVar("MessageT", bound=Message)


def changed(message: MessageT, /, **fields: Any) -> MessageT:
    """Returns a copy with changed fields, like `dataclasses.replace`; None clears a field."""
    copy = type(message)()
    copy.CopyFrom(message)
    for name in fields:
        copy.ClearField(name)
    copy.MergeFrom(type(message)(**fields))
    return copy


def news_of(event: task_service_pb2.WatchTaskResponse) -> task_pb2.Task | task_pb2.TaskPiece:
    """Returns the content of a watch event."""
    return event.piece if event.HasField("piece") else event.task


def watched(news: Message) -> task_service_pb2.WatchTaskResponse:
    if isinstance(news, task_pb2.Task):
        return task_service_pb2.WatchTaskResponse(task=news)
    assert isinstance(news, task_pb2.TaskPiece)
    return task_service_pb2.WatchTaskResponse(piece=news)


class LineCounts(NamedTuple):
    """Numbers of lines in a batch: total, and by result."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0


def counts_of(batch: batch_service_pb2.Batch) -> LineCounts:
    return LineCounts(
        total=batch.total_count,
        completed=batch.completed_count,
        failed=batch.failed_count,
        cancelled=batch.cancelled_count,
        expired=batch.expired_count,
    )
