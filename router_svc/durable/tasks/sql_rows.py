"""Tasks as rows and back."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

from sqlalchemy import Insert, Row, insert, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from router_svc.durable.tasks.store_port import TaskRow
from router_svc.store.tables import MAX_CALLER_CHARS, task_specs, tasks
from weft.durable.tasks import Submitted, Task, TaskFailure, TaskState, event_number, task_being_deleted
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

STAGED = 0
"""State of a line whose batch is still being taken in: nobody sees it, and nobody begins it."""

READY_NOW = 0.0
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
        "ready_at": READY_NOW,
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


_KEY = (tasks.c.tenant, tasks.c.idempotency_key)
_INSERTS: Mapping[str, Insert] = {
    # Another router may be about to keep the same key: this waits for it, and then keeps nothing.
    "sqlite": sqlite.insert(tasks).on_conflict_do_nothing(index_elements=_KEY),
    "postgresql": postgresql.insert(tasks).on_conflict_do_nothing(index_elements=_KEY),
}


async def submit_rows(connection: AsyncConnection, rows: Sequence[TaskRow]) -> Sequence[Submitted | WeftError]:
    """Keep those whose keys are free; what each came to, in their order. Only new tasks are PENDING for sure."""
    keyed = [row for row in rows if row.idempotency_key]
    unkeyed = [row for row in rows if not row.idempotency_key]
    if unkeyed:
        await connection.execute(insert(tasks), [values_of(row, TaskState.PENDING) for row in unkeyed])
    kept = await _insert_keyed(connection, keyed) if keyed else {}
    done = [_submitted(row, kept) for row in rows]
    new = [row for row, each in zip(rows, done, strict=True) if isinstance(each, Submitted) and not each.existed]
    if new:
        await connection.execute(insert(task_specs), [{"task_id": row.id, "spec": row.spec} for row in new])
    return done


async def find(connection: AsyncConnection, row: TaskRow) -> Submitted | WeftError | None:
    """See TaskStore.submitted; the error is returned."""
    if not row.idempotency_key:
        return None
    query = select(tasks).where(tasks.c.tenant == row.lane.tenant, tasks.c.idempotency_key == row.idempotency_key)
    found = (await connection.execute(query)).first()
    return None if found is None else _submitted(row, {_key_of(row): found})


async def _insert_keyed(connection: AsyncConnection, rows: Sequence[TaskRow]) -> Mapping[tuple[str, str], Any]:
    """The tasks that have the keys now."""
    # In one order everywhere: two routers that keep the same keys wait for each other, never both.
    ordered = sorted(rows, key=_key_of)
    statement = _INSERTS[connection.dialect.name]
    await connection.execute(statement, [values_of(row, TaskState.PENDING) for row in ordered])
    kept: dict[tuple[str, str], Any] = {}
    # One tenant at a time: SQLite reads every task where it is asked for pairs.
    for tenant, of_tenant in groupby(ordered, key=lambda row: row.lane.tenant):
        keys = sorted({row.idempotency_key for row in of_tenant})
        query = select(tasks).where(tasks.c.tenant == tenant, tasks.c.idempotency_key.in_(keys))
        kept |= {(tenant, row.idempotency_key): row for row in await connection.execute(query)}
    return kept


def _submitted(row: TaskRow, kept: Mapping[tuple[str, str], Any]) -> Submitted | WeftError:
    if not row.idempotency_key:
        return Submitted(task=_new(row))
    found = kept.get(_key_of(row))
    if found is None:
        # It was forgotten between the two statements.
        return task_being_deleted()
    if found.id == row.id:
        return Submitted(task=_new(row))
    if found.digest != row.digest:
        return WeftError(
            Reason.IDEMPOTENCY_CONFLICT, "this idempotency key came with another request before; use a new one"
        )
    return Submitted(task=task_of(found), existed=True)


def _key_of(row: TaskRow) -> tuple[str, str]:
    return row.lane.tenant, row.idempotency_key


def _new(row: TaskRow) -> Task:
    return Task(
        id=row.id,
        tenant=row.lane.tenant,
        state=TaskState.PENDING,
        model=row.lane.model,
        batch=row.batch,
        line=row.line,
        created_at=utc(row.created_at),
        expires_at=utc(row.expires_at),
        max_attempts=row.max_attempts,
        origin_kind=row.origin_kind,
    )
