"""Items of batches on SQL, which are rows of the task table; decisions are in `batch_manager`.

Every method raises SERVICE_UNAVAILABLE.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import and_, case, delete, func, literal, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from router_svc.durable.batches.batch_sql import DELETING, RECEIVING
from router_svc.durable.tasks.sql_rows import READY_NOW, STAGED, insert_rows, task_of
from router_svc.durable.tasks.store_port import ManyChanged, StoreEvent, TaskRow
from router_svc.durable.tasks.task_events import notify_routers
from router_svc.store.database import RouterDatabase
from router_svc.store.tables import batches, task_attempts, task_pieces, task_specs, tasks
from weft.durable.batches import BatchState, LineCounts
from weft.durable.tasks import Task, TaskState
from weft.kernel.reasons import Reason

CHANGED_AT_ONCE = 1_000
"""Items that one transaction changes or deletes; other writes run in between."""
ORIGIN = "batches"
"""Origin of batch events: the id of no listener, so that the engine of this very router receives them too."""
CANCELLED_MESSAGE = "its batch was cancelled"
_OPEN = (TaskState.PENDING, TaskState.RUNNING)
_COUNTED = ("completed", "failed", "cancelled", "expired")


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemTally:
    """Counts of a batch's items by how they ended."""

    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0
    open: int = 0
    """Items that have not ended."""
    last_ended_at: float | None = None

    def counts(self, total: int) -> LineCounts:
        """Returns the counts with a total."""
        return LineCounts(total=total, **{name: getattr(self, name) for name in _COUNTED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """An item without its spec and its answer."""

    task: Task
    custom_id: str
    size: int
    """Bytes of its spec and its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemContent:
    """The spec and the answer of an item."""

    spec: bytes
    outputs: Sequence[bytes]
    """Chunks of the answer, if completed."""


class ItemTable:
    """The task tables, restricted to items of batches."""

    def __init__(self, database: RouterDatabase) -> None:
        self._database = database

    async def open_count(self, tenant: str) -> int:
        """Returns the number of pending and running tasks of a tenant."""
        # Literals, so that SQLite uses the partial index of pending tasks.
        states = [tasks.c.state == literal(int(state), literal_execute=True) for state in _OPEN]
        async with self._database.reading() as connection:
            found = [
                await connection.execute(select(func.count()).where(tasks.c.tenant == tenant, state))
                for state in states
            ]
        return sum(int(each.scalar_one()) for each in found)

    async def add(self, batch_id: str, rows: Sequence[TaskRow]) -> bool:
        """Adds items to a batch that is being received. False: it is not any more."""
        async with self._database.writing() as connection:
            if not await _is_receiving(connection, batch_id):
                return False
            await insert_rows(connection, rows, state=STAGED)
            return True

    async def activate(self, batch_id: str, total: int, events: Sequence[StoreEvent]) -> bool:
        """Makes all items pending and notifies other routers. False: the batch was removed."""
        async with self._database.writing() as connection:
            done = await connection.execute(
                update(batches)
                .where(batches.c.id == batch_id, batches.c.state == RECEIVING)
                .values(state=BatchState.IN_PROGRESS, total_count=total)
            )
            if not done.rowcount:
                return False
            await connection.execute(
                update(tasks)
                .where(tasks.c.batch_id == batch_id, tasks.c.state == STAGED)
                .values(state=TaskState.PENDING, ready_at=READY_NOW)
            )
            await self._publish(connection, events)
            return True

    async def drop(self, batch_id: str) -> None:
        """Deletes an incomplete batch with its items, some at a time; a complete one stays."""
        async with self._database.writing() as connection:
            await connection.execute(
                update(batches).where(batches.c.id == batch_id, batches.c.state == RECEIVING).values(state=DELETING)
            )
        going = select(batches.c.seq).where(batches.c.id == batch_id, batches.c.state == DELETING)
        some = (
            select(tasks.c.seq)
            .where(tasks.c.batch_id == batch_id, tasks.c.state == STAGED)
            .order_by(tasks.c.line)
            .limit(CHANGED_AT_ONCE)
        )
        more = True
        while more:
            async with self._database.writing() as connection:
                if (await connection.execute(going)).first() is None:
                    return
                more = (await connection.execute(delete(tasks).where(tasks.c.seq.in_(some)))).rowcount > 0
                if not more:
                    await connection.execute(delete(batches).where(batches.c.id == batch_id))

    async def tallies(self, batch_ids: Sequence[str]) -> Mapping[str, ItemTally]:
        """Returns the item counts of some batches."""
        # Expired: failed by and after the end of the window, whether or not it had started before.
        is_expired = and_(
            tasks.c.error_reason == Reason.DEADLINE_EXCEEDED.value, tasks.c.ended_at >= tasks.c.window_ends_at
        )
        end = case(
            (tasks.c.state == TaskState.COMPLETED, "completed"),
            (tasks.c.state == TaskState.CANCELLED, "cancelled"),
            (and_(tasks.c.state == TaskState.FAILED, is_expired), "expired"),
            (tasks.c.state == TaskState.FAILED, "failed"),
            else_="open",
        ).label("end_kind")
        inner = select(tasks.c.batch_id, end, tasks.c.ended_at).where(tasks.c.batch_id.in_(batch_ids)).subquery()
        query = select(
            inner.c.batch_id, inner.c.end_kind, func.count().label("number"), func.max(inner.c.ended_at).label("last")
        ).group_by(inner.c.batch_id, inner.c.end_kind)
        found: dict[str, dict[str, int]] = {batch_id: {} for batch_id in batch_ids}
        last: dict[str, float] = {}
        async with self._database.reading() as connection:
            for row in await connection.execute(query):
                found[row.batch_id][row.end_kind] = row.number
                if row.last is not None:
                    last[row.batch_id] = max(row.last, last.get(row.batch_id, row.last))
        return {batch_id: ItemTally(**ends, last_ended_at=last.get(batch_id)) for batch_id, ends in found.items()}

    async def cancel_some(self, batch_id: str, now: float, limit: int) -> int:
        """Cancels some open items, except rows that are locked by another transaction; returns how many."""
        some = (
            select(tasks.c.id)
            .where(tasks.c.batch_id == batch_id, tasks.c.state.in_(_OPEN))
            .order_by(tasks.c.line)
            .limit(limit)
            # Other bulk changes lock rows in another order: waiting for them could deadlock.
            .with_for_update(skip_locked=True)
        )
        async with self._database.writing() as connection:
            return await self._cancel(connection, [row.id for row in await connection.execute(some)], now)

    async def cancel_next(self, batch_id: str, now: float) -> bool:
        """Cancels one item, waiting for its lock; False: every item has ended."""
        one = select(tasks.c.id).where(tasks.c.batch_id == batch_id, tasks.c.state.in_(_OPEN)).limit(1)
        async with self._database.writing() as connection:
            found = [row.id for row in await connection.execute(one)]
            await self._cancel(connection, found, now)
            return bool(found)

    async def page(self, batch_id: str, after_line: int, limit: int) -> Sequence[Item]:
        """Returns items after a line number, in order."""
        query = (
            select(tasks, func.length(task_specs.c.spec).label("spec_size"))
            .join(task_specs, task_specs.c.task_id == tasks.c.id)
            .where(tasks.c.batch_id == batch_id, tasks.c.line > after_line, tasks.c.state != STAGED)
            .order_by(tasks.c.line)
            .limit(limit)
        )
        async with self._database.reading() as connection:
            return [
                Item(task=task_of(row), custom_id=row.custom_id, size=row.spec_size + row.result_size)
                for row in await connection.execute(query)
            ]

    async def contents(self, lines: Sequence[Item]) -> Mapping[str, ItemContent]:
        """Returns specs and answers of items, by task id, without those that were purged meanwhile."""
        completed = [line.task.id for line in lines if line.task.state is TaskState.COMPLETED]
        chunks = (
            select(task_pieces.c.task_id, task_pieces.c.output)
            .join(tasks, and_(tasks.c.id == task_pieces.c.task_id, tasks.c.attempt == task_pieces.c.attempt))
            .where(task_pieces.c.task_id.in_(completed))
            .order_by(task_pieces.c.task_id, task_pieces.c.first_index)
        )
        specs = select(task_specs).where(task_specs.c.task_id.in_([line.task.id for line in lines]))
        outputs: dict[str, list[bytes]] = {task_id: [] for task_id in completed}
        async with self._database.reading() as connection:
            for row in await connection.execute(chunks):
                outputs[row.task_id].append(row.output)
            # After the chunks: a task that still has its spec had all its chunks then.
            return {
                row.task_id: ItemContent(spec=row.spec, outputs=outputs.get(row.task_id, ()))
                for row in await connection.execute(specs)
            }

    async def _cancel(self, connection: AsyncConnection, task_ids: Sequence[str], now: float) -> int:
        if not task_ids:
            return 0
        done = await connection.execute(
            update(tasks)
            .where(tasks.c.id.in_(task_ids), tasks.c.state.in_(_OPEN))
            .values(state=TaskState.CANCELLED, ended_at=now, owner="", lease_until=None)
        )
        await connection.execute(
            update(task_attempts)
            .where(task_attempts.c.task_id.in_(task_ids), task_attempts.c.ended_at.is_(None))
            .values(ended_at=now, reason=Reason.CANCELLED.value, message=CANCELLED_MESSAGE)
        )
        await self._publish(connection, [ManyChanged()])
        return done.rowcount

    async def _publish(self, connection: AsyncConnection, events: Sequence[StoreEvent]) -> None:
        if self._database.is_shared:
            await notify_routers(connection, ORIGIN, events)


async def _is_receiving(connection: AsyncConnection, batch_id: str) -> bool:
    query = select(batches.c.seq).where(batches.c.id == batch_id, batches.c.state == RECEIVING).with_for_update()
    return (await connection.execute(query)).first() is not None
