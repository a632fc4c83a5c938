"""What ends tasks from outside, on SQL: their owners, and time."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Row, bindparam, delete, exists, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from router_svc.store.tables import batches, tasks
from router_svc.tasks.rows import AT_ONCE, UNBORN, task_of
from router_svc.tasks.sql_claims import (
    IS_OVER,
    IS_PENDING,
    IS_RUNNING,
    NOTHING_SAID,
    UNCLAIMED,
    end_attempts,
    expiry_at,
    forget_pieces,
    lane_of,
)
from router_svc.tasks.store_port import LOST_LEASE, Claim, LostLease
from weft.durable.batches import BatchState
from weft.durable.tasks import Task, TaskFailure, TaskState
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

_BY_OWNER = TaskFailure(reason=Reason.CANCELLED, message="it was cancelled")
_LOST = TaskFailure(reason=LOST_LEASE, message="the router that ran it gave no sign of life")
_UNWRITTEN = (BatchState.IN_PROGRESS, BatchState.FINALIZING)
"""States of batches whose results are still to be written, from their lines."""
_END = update(tasks).where(tasks.c.seq == bindparam("of_seq"))


async def cancel(connection: AsyncConnection, tenant: str, task_id: str, now: float) -> Task | None:
    """See TaskStore.cancel."""
    row = await _owned(connection, tenant, task_id)
    if row is None or TaskState(row.state).is_terminal:
        return None if row is None else task_of(row)
    ended = update(tasks).where(tasks.c.seq == row.seq).returning(tasks)
    values = {"state": TaskState.CANCELLED.value, "ended_at": now, **UNCLAIMED}
    after = (await connection.execute(ended.values(values))).one()
    if row.state == TaskState.RUNNING:
        await end_attempts(connection, [Claim(task_id, row.owner, row.attempt)], _BY_OWNER, now)
    return replace(task_of(after), owner=row.owner)


async def delete_ended(connection: AsyncConnection, tenant: str, task_id: str) -> Task | WeftError | None:
    """See TaskStore.delete; the error is returned."""
    row = await _owned(connection, tenant, task_id)
    if row is None:
        return None
    if not TaskState(row.state).is_terminal:
        return WeftError(Reason.RESOURCE_IN_USE, f"task {task_id} is not at its end; cancel it first")
    await connection.execute(delete(tasks).where(tasks.c.seq == row.seq))
    return task_of(row)


async def revert_expired(connection: AsyncConnection, now: float, limit: int) -> Sequence[LostLease]:
    """See TaskStore.revert_expired."""
    over = (
        select(tasks)
        .where(IS_RUNNING, tasks.c.lease_until <= now)
        .order_by(tasks.c.lease_until)
        .limit(limit)
        # Whom another router works on is not lost, or that one reverts it.
        .with_for_update(skip_locked=True)
    )
    rows = (await connection.execute(over)).all()
    if not rows:
        return ()
    lost = [_lost(row) for row in rows]
    claims = [each.claim for each in lost]
    again = [_again(row) for row, each in zip(rows, lost, strict=True) if each.state is TaskState.PENDING]
    failed = [_failed(row, now) for row, each in zip(rows, lost, strict=True) if each.state is TaskState.FAILED]
    if again:
        await connection.execute(_END.values(expires_at=expiry_at(now)), again)
    if failed:
        await connection.execute(_END, failed)
    await forget_pieces(connection, claims)
    await end_attempts(connection, claims, _LOST, now)
    return lost


async def fail_expired(connection: AsyncConnection, now: float, limit: int) -> Sequence[str]:
    """See TaskStore.fail_expired."""
    over = (
        select(tasks.c.seq, tasks.c.id, tasks.c.attempt, tasks.c.window_ends_at, tasks.c.pending_limit_seconds)
        .where(IS_PENDING, tasks.c.expires_at <= now)
        .order_by(tasks.c.expires_at)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    rows = (await connection.execute(over)).all()
    if rows:
        await connection.execute(_END, [_ended(row.seq, now, _why_never(row)) for row in rows])
    return [row.id for row in rows]


async def forget_ended(connection: AsyncConnection, before: float, limit: int) -> int:
    """See TaskStore.forget_ended."""
    is_awaited = exists().where(batches.c.id == tasks.c.batch_id, batches.c.state.in_(_UNWRITTEN))
    old = select(tasks.c.seq).where(IS_OVER, tasks.c.ended_at < before, ~is_awaited)
    old = old.order_by(tasks.c.ended_at).limit(limit)
    done = await connection.execute(delete(tasks).where(tasks.c.seq.in_(old.with_for_update(skip_locked=True))))
    return done.rowcount


async def _owned(connection: AsyncConnection, tenant: str, task_id: str) -> Row[Any] | None:
    query = select(tasks).where(tasks.c.id == task_id, tasks.c.tenant == tenant, tasks.c.state != UNBORN)
    return (await connection.execute(query.with_for_update())).first()


def _lost(row: Any) -> LostLease:
    is_last = row.failures + 1 >= row.max_attempts
    return LostLease(
        claim=Claim(row.id, row.owner, row.attempt),
        lane=lane_of(row),
        state=TaskState.FAILED if is_last else TaskState.PENDING,
    )


def _again(row: Any) -> dict[str, object]:
    state = {"of_seq": row.seq, "state": TaskState.PENDING.value, "failures": row.failures + 1}
    return {**state, "ready_at": AT_ONCE, **UNCLAIMED, **NOTHING_SAID}


def _failed(row: Any, now: float) -> dict[str, object]:
    times = f"{row.failures + 1} attempts" if row.failures else "1 attempt"
    failure = TaskFailure(reason=_LOST.reason, message=f"{_LOST.message}; given up after {times}")
    return _ended(row.seq, now, failure) | {"failures": row.failures + 1, **NOTHING_SAID}


def _ended(seq: int, now: float, failure: TaskFailure) -> dict[str, object]:
    why = {"error_reason": failure.reason.value, "error_message": failure.message}
    return {"of_seq": seq, "state": TaskState.FAILED.value, "ended_at": now, **UNCLAIMED, **why}


def _why_never(row: Any) -> TaskFailure:
    begun = "begun again" if row.attempt else "begun"
    if row.window_ends_at is not None:
        return TaskFailure(reason=Reason.DEADLINE_EXCEEDED, message=f"its window ended before it was {begun}")
    waited = f"it waited {row.pending_limit_seconds:g} s and was not {begun}: no runner had a slot for it"
    return TaskFailure(reason=Reason.QUEUE_TIMEOUT, message=waited)
