"""Tasks as rows and back."""

from collections.abc import Sequence
from datetime import UTC, datetime

from sqlalchemy import Row, insert
from sqlalchemy.ext.asyncio import AsyncConnection

from router_svc.store.tables import MAX_CALLER_CHARS, task_specs, tasks
from router_svc.tasks.store_port import TaskRow
from weft.durable.tasks import Task, TaskFailure, TaskState, event_number
from weft.kernel.reasons import Reason

UNBORN = 0
"""State of a line whose batch is still being taken in: nobody sees it, and nobody begins it."""

AT_ONCE = 0.0
"""When a task is ready that need not pause, whatever time whoever looks has: clocks are set back, and two routers'
never agree to the millisecond in which one tells the other."""


async def insert_rows(connection: AsyncConnection, rows: Sequence[TaskRow], *, state: int = TaskState.PENDING) -> None:
    """Keep new tasks, whose ids and keys are free."""
    await connection.execute(insert(tasks), [values_of(row, state) for row in rows])
    await connection.execute(insert(task_specs), [{"task_id": row.id, "spec": row.spec} for row in rows])


def values_of(row: TaskRow, state: int) -> dict[str, object]:
    """The columns of a new task."""
    return {
        "id": row.id,
        "tenant": row.lane.tenant,
        "idempotency_key": row.idempotency_key or None,
        "digest": row.digest,
        "state": state,
        "model": row.lane.model,
        "band": row.lane.band.value,
        "batch_id": row.batch,
        "line": row.line,
        "custom_id": row.custom_id,
        "origin_kind": row.origin_kind,
        "caller": row.caller[:MAX_CALLER_CHARS],
        "attempt": 0,
        "failures": 0,
        "max_attempts": row.max_attempts,
        "owner": "",
        "lease_until": None,
        "lease_seconds": None,
        "pending_limit_seconds": row.pending_limit_seconds,
        "window_ends_at": row.window_ends_at,
        "ready_at": AT_ONCE,
        "expires_at": row.expires_at,
        "created_at": row.created_at,
        "started_at": None,
        "ended_at": None,
        "last_index": 0,
        "result_size": 0,
        "error_reason": Reason.UNSPECIFIED.value,
        "error_message": "",
    }


def task_of(row: Row[tuple[object, ...]]) -> Task:
    """A task as its row says."""
    state = TaskState(row.state)
    failed = state is TaskState.FAILED
    return Task(
        id=row.id,
        tenant=row.tenant,
        state=state,
        model=row.model,
        batch=row.batch_id,
        line=row.line,
        created_at=utc(row.created_at),
        started_at=None if row.started_at is None else utc(row.started_at),
        ended_at=None if row.ended_at is None else utc(row.ended_at),
        expires_at=utc(row.expires_at) if state is TaskState.PENDING else None,
        attempt=row.attempt,
        max_attempts=row.max_attempts,
        error=TaskFailure(reason=_reason(row.error_reason), message=row.error_message) if failed else None,
        last_event=event_number(row.attempt, row.last_index) if row.last_index else 0,
        origin_kind=row.origin_kind,
        owner=row.owner,
    )


def utc(seconds: float) -> datetime:
    """A moment as people and messages have it."""
    return datetime.fromtimestamp(seconds, UTC)


def _reason(number: int) -> Reason:
    """One that a newer release wrote is a fault that this one does not know."""
    try:
        return Reason(number)
    except ValueError:
        return Reason.INTERNAL
