"""Rows of tasks: columns to and from `Task`, and inserts of new tasks, many in a few statements."""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import groupby
from typing import Any

from sqlalchemy import Insert, Row, insert, select
from sqlalchemy.dialects import sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from router_svc.durable.tasks.store_port import TaskRow
from router_svc.store.tables import MAX_CALLER_CHARS, task_specs, tasks
from weft.api.router.v1 import task_pb2
from weft.api.router.v1 import task_service_pb2 as pb
from weft.durable.tasks import event_number, task_being_deleted, task_error
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason, reason_of
from weft.kernel.timestamps import optional_stamp, stamp_of

STAGED = 0
"""State of an item whose batch is still being received: it is not visible, and does not start."""

READY_NOW = 0.0
"""`ready_at` of a task without a pause. Zero rather than now, so that it is ready by every router's clock, also after a
clock was set back."""


async def insert_rows(
    connection: AsyncConnection, rows: Sequence[TaskRow], *, state: int = task_pb2.TASK_STATE_PENDING
) -> None:
    """Inserts new tasks, whose ids and idempotency keys are free."""
    await connection.execute(insert(tasks), [values_of(row, state) for row in rows])
    await connection.execute(insert(task_specs), [{"task_id": row.id, "spec": row.spec} for row in rows])


def values_of(row: TaskRow, state: int) -> dict[str, object]:
    """Returns the columns of a new task."""
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


def task_of(row: Row[tuple[object, ...]]) -> task_pb2.Task:
    """Returns the task of a row."""
    failed = row.state == task_pb2.TASK_STATE_FAILED
    return task_pb2.Task(
        id=row.id,
        tenant=row.tenant,
        state=row.state,
        model=row.model,
        batch=row.batch_id,
        line=row.line,
        create_time=stamp_of(row.created_at),
        start_time=optional_stamp(row.started_at),
        end_time=optional_stamp(row.ended_at),
        expire_time=stamp_of(row.expires_at) if row.state == task_pb2.TASK_STATE_PENDING else None,
        attempt=row.attempt,
        max_attempts=row.max_attempts,
        error=task_error(reason_of(row.error_reason), row.error_message) if failed else None,
        last_event=event_number(row.attempt, row.last_index) if row.last_index else 0,
        origin_kind=row.origin_kind,
        owner=row.owner,
    )


_KEY = (tasks.c.tenant, tasks.c.idempotency_key)


@cache
def _insert_if_absent(dialect: str) -> Insert:
    """Returns an insert that waits for another router's transaction with the same key, and then inserts nothing."""
    if dialect == "postgresql":
        # Twenty modules that a mesh on SQLite does not need.
        from sqlalchemy.dialects import postgresql  # noqa: PLC0415

        return postgresql.insert(tasks).on_conflict_do_nothing(index_elements=_KEY)
    return sqlite.insert(tasks).on_conflict_do_nothing(index_elements=_KEY)


async def submit_rows(
    connection: AsyncConnection, rows: Sequence[TaskRow]
) -> Sequence[pb.SubmitTaskResponse | WeftError]:
    """Inserts the tasks whose idempotency keys are free; returns the result of each, in order."""
    keyed = [row for row in rows if row.idempotency_key]
    unkeyed = [row for row in rows if not row.idempotency_key]
    if unkeyed:
        await connection.execute(insert(tasks), [values_of(row, task_pb2.TASK_STATE_PENDING) for row in unkeyed])
    kept = await _insert_keyed(connection, keyed) if keyed else {}
    done = [_submitted(row, kept) for row in rows]
    new = [
        row
        for row, each in zip(rows, done, strict=True)
        if isinstance(each, pb.SubmitTaskResponse) and not each.existed
    ]
    if new:
        await connection.execute(insert(task_specs), [{"task_id": row.id, "spec": row.spec} for row in new])
    return done


async def find(connection: AsyncConnection, row: TaskRow) -> pb.SubmitTaskResponse | WeftError | None:
    """Returns what `TaskStore.submitted` promises; an error is returned, not raised."""
    if not row.idempotency_key:
        return None
    query = select(tasks).where(tasks.c.tenant == row.lane.tenant, tasks.c.idempotency_key == row.idempotency_key)
    found = (await connection.execute(query)).first()
    return None if found is None else _submitted(row, {_key_of(row): found})


async def _insert_keyed(connection: AsyncConnection, rows: Sequence[TaskRow]) -> Mapping[tuple[str, str], Any]:
    """Inserts tasks whose keys are free; returns the tasks that have the keys now."""
    # In one order everywhere: two routers with the same keys then cannot deadlock.
    ordered = sorted(rows, key=_key_of)
    statement = _insert_if_absent(connection.dialect.name)
    await connection.execute(statement, [values_of(row, task_pb2.TASK_STATE_PENDING) for row in ordered])
    kept: dict[tuple[str, str], Any] = {}
    # One tenant at a time: SQLite scans the whole table for a list of pairs.
    for tenant, of_tenant in groupby(ordered, key=lambda row: row.lane.tenant):
        keys = sorted({row.idempotency_key for row in of_tenant})
        query = select(tasks).where(tasks.c.tenant == tenant, tasks.c.idempotency_key.in_(keys))
        kept |= {(tenant, row.idempotency_key): row for row in await connection.execute(query)}
    return kept


def _submitted(row: TaskRow, kept: Mapping[tuple[str, str], Any]) -> pb.SubmitTaskResponse | WeftError:
    if not row.idempotency_key:
        return pb.SubmitTaskResponse(task=_new(row))
    found = kept.get(_key_of(row))
    if found is None:
        # It was purged between the two statements.
        return task_being_deleted()
    if found.id == row.id:
        return pb.SubmitTaskResponse(task=_new(row))
    if found.digest != row.digest:
        return WeftError(
            Reason.IDEMPOTENCY_CONFLICT, "this idempotency key was used with another request; use a new one"
        )
    return pb.SubmitTaskResponse(task=task_of(found), existed=True)


def _key_of(row: TaskRow) -> tuple[str, str]:
    return row.lane.tenant, row.idempotency_key


def _new(row: TaskRow) -> task_pb2.Task:
    return task_pb2.Task(
        id=row.id,
        tenant=row.lane.tenant,
        state=task_pb2.TASK_STATE_PENDING,
        model=row.lane.model,
        batch=row.batch,
        line=row.line,
        create_time=stamp_of(row.created_at),
        expire_time=stamp_of(row.expires_at),
        max_attempts=row.max_attempts,
        origin_kind=row.origin_kind,
    )
