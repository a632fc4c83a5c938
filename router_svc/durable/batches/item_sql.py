"""Lines of batches on SQL: they are tasks. Nothing here decides anything: see `batch_keeper`.

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
"""Lines that one transaction changes or deletes: others have their turn in between."""
ORIGIN = "batches"
"""Whose news they are: nobody's who listens, so that whoever runs tasks in this very router hears them, too."""
CANCELLED_WORDS = "its batch was cancelled"
_OPEN = (TaskState.PENDING, TaskState.RUNNING)
_COUNTED = ("completed", "failed", "cancelled", "expired")


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemTally:
    """Where the lines of a batch are."""

    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0
    open: int = 0
    """Those that are not at their end."""
    last_ended_at: float | None = None

    def counts(self, total: int) -> LineCounts:
        """The same, of so many lines in all."""
        return LineCounts(total=total, **{name: getattr(self, name) for name in _COUNTED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A line, without what is long."""

    task: Task
    custom_id: str
    size: int
    """Bytes of its spec and its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemContent:
    """What is long of a line."""

    spec: bytes
    outputs: Sequence[bytes]
    """Of a completed one."""


class ItemTable:
    """The tables of tasks, as far as they are lines of batches."""

    def __init__(self, database: RouterDatabase) -> None:
        self._database = database

    async def open_count(self, tenant: str) -> int:
        """How many tasks of a tenant wait or run."""
        # Without this form SQLite does not see that its index of tasks that wait is all it needs.
        states = [tasks.c.state == literal(int(state), literal_execute=True) for state in _OPEN]
        async with self._database.reading() as connection:
            found = [
                await connection.execute(select(func.count()).where(tasks.c.tenant == tenant, state))
                for state in states
            ]
        return sum(int(each.scalar_one()) for each in found)

    async def add(self, batch_id: str, rows: Sequence[TaskRow]) -> bool:
        """More lines of one that is being taken in. False: it is not any more."""
        async with self._database.writing() as connection:
            if not await _is_coming_in(connection, batch_id):
                return False
            await insert_rows(connection, rows, state=STAGED)
            return True

    async def activate(self, batch_id: str, total: int, news: Sequence[StoreEvent]) -> bool:
        """All lines are there: they wait from now on, and other routers hear the news. False: the batch is gone."""
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
            await self._tell(connection, news)
            return True

    async def drop(self, batch_id: str) -> None:
        """Forget a batch that is not whole with its lines, some at a time; one that is whole stays."""
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
        """Where the lines of some batches are."""
        # After the window's end, and for that reason: whether it was begun before and came back does not matter.
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
        """End some lines that are not at their end, but for those that somebody else changes right now; how many."""
        some = (
            select(tasks.c.id)
            .where(tasks.c.batch_id == batch_id, tasks.c.state.in_(_OPEN))
            .order_by(tasks.c.line)
            .limit(limit)
            # Whoever changes several tasks at once locks them in another order: waiting for each other would not end.
            .with_for_update(skip_locked=True)
        )
        async with self._database.writing() as connection:
            return await self._cancel(connection, [row.id for row in await connection.execute(some)], now)

    async def cancel_next(self, batch_id: str, now: float) -> bool:
        """End one line, once nobody else changes it any more; False: every line is at its end."""
        one = select(tasks.c.id).where(tasks.c.batch_id == batch_id, tasks.c.state.in_(_OPEN)).limit(1)
        async with self._database.writing() as connection:
            found = [row.id for row in await connection.execute(one)]
            await self._cancel(connection, found, now)
            return bool(found)

    async def page(self, batch_id: str, after_line: int, limit: int) -> Sequence[Item]:
        """Lines after one, in order."""
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
        """What is long of some lines, by task; those that were forgotten meanwhile are not among them."""
        completed = [line.task.id for line in lines if line.task.state is TaskState.COMPLETED]
        pieces = (
            select(task_pieces.c.task_id, task_pieces.c.output)
            .join(tasks, and_(tasks.c.id == task_pieces.c.task_id, tasks.c.attempt == task_pieces.c.attempt))
            .where(task_pieces.c.task_id.in_(completed))
            .order_by(task_pieces.c.task_id, task_pieces.c.first_index)
        )
        specs = select(task_specs).where(task_specs.c.task_id.in_([line.task.id for line in lines]))
        outputs: dict[str, list[bytes]] = {task_id: [] for task_id in completed}
        async with self._database.reading() as connection:
            for row in await connection.execute(pieces):
                outputs[row.task_id].append(row.output)
            # After the pieces: a task that has its spec now had all its pieces then.
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
            .values(ended_at=now, reason=Reason.CANCELLED.value, message=CANCELLED_WORDS)
        )
        await self._tell(connection, [ManyChanged()])
        return done.rowcount

    async def _tell(self, connection: AsyncConnection, news: Sequence[StoreEvent]) -> None:
        if self._database.is_shared:
            await notify_routers(connection, ORIGIN, news)


async def _is_coming_in(connection: AsyncConnection, batch_id: str) -> bool:
    query = select(batches.c.seq).where(batches.c.id == batch_id, batches.c.state == RECEIVING).with_for_update()
    return (await connection.execute(query)).first() is not None
