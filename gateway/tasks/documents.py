"""Tasks as JSON values: what `/api/v1/inference-tasks` answers."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, datetime

from google.protobuf.json_format import MessageToDict

from gateway.answers.sse import encode_json
from gateway.errors import words_of
from gateway.tasks.surface import Surfaces
from weft.durable.tasks import Task, TaskAttempt, TaskChunk, TaskEvent, TaskFailure, TaskPage
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

JsonObject = dict[str, object]


def task_json(task: Task, surfaces: Surfaces) -> JsonObject:
    """A task; see `gateway.tasks.submission.TaskObject`."""
    surface = surfaces.of_kind(task.origin_kind)
    return {
        "id": task.id,
        "object": "inference_task",
        "state": task.state.name.lower(),
        "model": task.model,
        "endpoint": None if surface is None else surface.endpoint,
        "batch": task.batch or None,
        "created_at": time_text(task.created_at),
        "started_at": _time(task.started_at),
        "ended_at": _time(task.ended_at),
        "expires_at": _time(task.expires_at),
        "attempt": task.attempt,
        "max_attempts": task.max_attempts,
        "last_event": task.last_event,
        "waiting_for": task.waiting_for or None,
        "error": _failure(task.error),
    }


def attempt_json(attempt: TaskAttempt) -> JsonObject:
    """One time that a task was begun. Which router that was says nothing to callers."""
    failure = None
    if attempt.reason is not Reason.UNSPECIFIED:
        failure = TaskFailure(reason=attempt.reason, message=attempt.message)
    return {
        "attempt": attempt.attempt,
        "claimed_at": time_text(attempt.claimed_at),
        "ended_at": _time(attempt.ended_at),
        "error": _failure(failure),
    }


def error_json(error: WeftError) -> JsonObject:
    """A failure in the words of the envelope."""
    return {"code": error.reason.name.lower(), "message": words_of(error)}


def page_json(page: TaskPage, surfaces: Surfaces) -> JsonObject:
    """A page of a list."""
    return {
        "object": "list",
        "data": [task_json(task, surfaces) for task in page.tasks],
        "next_page_token": page.next_page_token or None,
        **({"notice": page.notice} if page.notice else {}),
    }


def piece_json(piece: TaskChunk) -> JsonObject:
    """A piece of an answer: events and vectors in the JSON of their messages, names as in the protos."""
    return {
        "attempt": piece.attempt,
        "last_event": piece.last_event,
        **MessageToDict(piece.output, preserving_proto_field_name=True),
    }


async def encoded_news(news: AsyncGenerator[TaskEvent], surfaces: Surfaces, after: int) -> AsyncGenerator[bytes]:
    """Server-sent events `task` and `output`; whoever resumes at the id of the last one misses nothing."""
    number = after
    async with aclosing(news):
        async for item in news:
            if isinstance(item, TaskChunk):
                number = item.last_event
                yield _event("output", number, piece_json(item))
            else:
                yield _event("task", number, task_json(item, surfaces))


def _event(name: str, number: int, body: JsonObject) -> bytes:
    return b"event: %b\nid: %d\ndata: %b\n\n" % (name.encode(), number, encode_json(body))


def time_text(time: datetime) -> str:
    """RFC 3339 in UTC, to the millisecond."""
    return time.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _time(time: datetime | None) -> str | None:
    return None if time is None else time_text(time)


def _failure(failure: TaskFailure | None) -> JsonObject | None:
    return None if failure is None else error_json(WeftError(failure.reason, failure.message))
