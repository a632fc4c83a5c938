"""New tasks on SQL, many in a few statements."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from sqlalchemy import Insert, insert, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from router_svc.store.tables import task_specs, tasks
from router_svc.tasks.rows import task_of, utc, values_of
from router_svc.tasks.store_port import TaskRow
from weft.durable.tasks import Submitted, Task, TaskState, task_being_deleted
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

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
