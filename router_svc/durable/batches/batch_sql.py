"""The tables of batches and of their items on SQL; decisions are in `batch_manager`. Items are rows of the task table.

Every method raises SERVICE_UNAVAILABLE. Batches that are being received or deleted are not visible.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Row, Select, and_, case, delete, func, insert, literal, or_, select, true, update
from sqlalchemy.ext.asyncio import AsyncConnection

from router_svc.durable.batches.files import is_kept
from router_svc.durable.tasks.sql_rows import READY_NOW, STAGED, insert_rows, task_of
from router_svc.durable.tasks.store_port import ManyChanged, StoreEvent, TaskRow
from router_svc.durable.tasks.task_events import notify_routers
from router_svc.store.database import RouterDatabase
from router_svc.store.tables import batches, task_attempts, task_pieces, task_specs, tasks
from weft.api.router.v1 import batch_service_pb2 as batch_pb
from weft.api.router.v1 import task_pb2
from weft.durable.batches import BATCH_OUTPUT
from weft.kernel.reasons import Reason
from weft.kernel.timestamps import datetime_of, optional_stamp, stamp_of
from weft.sql.moments import BoundedMoment, bring_back

RECEIVING = 0
"""State of a batch whose items are being received."""
DELETING = -1
"""State of an incomplete batch whose items are being deleted; no item is added any more."""
_COUNT_COLUMNS = ("total_count", "completed_count", "failed_count", "cancelled_count", "expired_count")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenBatch:
    """A batch whose final counts are not stored."""

    seq: int
    tenant: str
    id: str
    is_cancelled: bool


class BatchTable:
    """The table of batches."""

    def __init__(self, database: RouterDatabase) -> None:
        self._database = database

    async def kept(self, tenant: str) -> int:
        """Returns the number of a tenant's batches, including those being received."""
        query = select(func.count()).where(batches.c.tenant == tenant)
        async with self._database.reading() as connection:
            return int((await connection.execute(query)).scalar_one())

    async def begin(self, batch: batch_pb.Batch, now: float) -> None:
        """Inserts a batch without items, or a failed one if it has errors."""
        values = {
            "id": batch.id,
            "tenant": batch.tenant,
            "state": batch_pb.BATCH_STATE_FAILED if batch.errors else RECEIVING,
            "endpoint": batch.endpoint,
            "input_file": batch.input_file,
            "output_file": "",
            "error_file": "",
            "metadata": json.dumps(dict(batch.metadata)).encode(),
            "errors": json.dumps([_error_json(error) for error in batch.errors]).encode(),
            **dict.fromkeys(_COUNT_COLUMNS, 0),
            "created_at": now,
            "window_ends_at": datetime_of(batch.window_end_time).timestamp(),
            "ended_at": now if batch.errors else None,
        }
        async with self._database.writing() as connection:
            await connection.execute(insert(batches), values)

    async def get(self, tenant: str, batch_id: str) -> batch_pb.Batch | None:
        """Returns a batch; the counts of ended items are set only once all have ended."""
        async with self._database.reading() as connection:
            found = (await connection.execute(_one(tenant, batch_id))).first()
        return None if found is None else _batch_of(found)

    async def list_page(self, tenant: str, after: str, limit: int) -> Sequence[batch_pb.Batch] | None:
        """Returns batches, newest first, older than `after` (empty: all); None: the tenant has no batch `after`."""
        query = select(batches).where(batches.c.tenant == tenant, batches.c.state > RECEIVING)
        async with self._database.reading() as connection:
            if after:
                place = (await connection.execute(_one(tenant, after))).first()
                if place is None:
                    return None
                query = query.where(batches.c.seq < place.seq)
            found = await connection.execute(query.order_by(batches.c.seq.desc()).limit(limit))
            return [_batch_of(row) for row in found]

    async def mark_cancelled(self, batch_id: str, now: float) -> bool:
        """Stores the time of a cancellation; False: all items had ended already."""
        async with self._database.writing() as connection:
            done = await connection.execute(
                update(batches)
                .where(batches.c.id == batch_id, batches.c.state == batch_pb.BATCH_STATE_IN_PROGRESS)
                .values(cancelled_at=func.coalesce(batches.c.cancelled_at, now))
            )
            return done.rowcount > 0

    async def store_counts(self, batch_id: str, tally: "ItemTally", lines_ended_at: float) -> None:
        """Stores the final counts of a batch whose items have all ended. Written once."""
        async with self._database.writing() as connection:
            await connection.execute(
                update(batches)
                .where(batches.c.id == batch_id, batches.c.state == batch_pb.BATCH_STATE_IN_PROGRESS)
                .values(
                    state=batch_pb.BATCH_STATE_FINALIZING,
                    lines_ended_at=lines_ended_at,
                    **tally.counts,
                )
            )

    async def finish(self, tenant: str, batch_id: str, results: dict[str, str], now: float) -> str:
        """Stores the result files of a batch, by column, unless they are stored already.

        Returns the column of a file that the tenant does not have; empty: all exist.
        """
        async with self._database.writing() as connection:
            state = await _locked_state(connection, batch_id)
            if state != batch_pb.BATCH_STATE_FINALIZING:
                return ""
            for column, file_id in results.items():
                if file_id and not await is_kept(connection, tenant, file_id, BATCH_OUTPUT):
                    return column
            values = {"state": batch_pb.BATCH_STATE_FINISHED, "ended_at": now, **results}
            await connection.execute(update(batches).where(batches.c.id == batch_id).values(values))
            return ""

    async def open_batches(self, after_seq: int, limit: int) -> Sequence[OpenBatch]:
        """Returns batches of all tenants without final counts, oldest first."""
        query = (
            select(batches.c.seq, batches.c.tenant, batches.c.id, batches.c.cancelled_at)
            .where(batches.c.seq > after_seq, batches.c.state == batch_pb.BATCH_STATE_IN_PROGRESS)
            .order_by(batches.c.seq)
            .limit(limit)
        )
        async with self._database.reading() as connection:
            return [
                OpenBatch(seq=row.seq, tenant=row.tenant, id=row.id, is_cancelled=row.cancelled_at is not None)
                for row in await connection.execute(query)
            ]

    async def bring_back(self, now: float, limit: int) -> int:
        """Moves creation and end times in the future, from before a clock was set back, to now; returns how many."""
        c = batches.c
        over = (c.lines_ended_at, c.ended_at)
        moments = [
            BoundedMoment(key=c.seq, column=c.created_at, latest=now, where=true(), along=(c.window_ends_at,)),
            *(BoundedMoment(key=c.seq, column=column, latest=now, where=true()) for column in over),
        ]
        async with self._database.writing() as connection:
            return await bring_back(connection, moments, limit)

    async def incomplete(self, before: float, limit: int) -> Sequence[str]:
        """Returns ids of incomplete batches that were begun before a time, oldest first."""
        query = (
            select(batches.c.id)
            .where(batches.c.state <= RECEIVING, batches.c.created_at < before)
            .order_by(batches.c.seq)
            .limit(limit)
        )
        async with self._database.reading() as connection:
            return [row.id for row in await connection.execute(query)]

    async def purge_ended(self, before: float, limit: int) -> int:
        """Deletes batches that ended before a time, or whose items did without written results; returns how many."""
        over = (
            select(batches.c.seq)
            .where(
                or_(
                    batches.c.ended_at < before,
                    and_(batches.c.state == batch_pb.BATCH_STATE_FINALIZING, batches.c.lines_ended_at < before),
                )
            )
            .order_by(batches.c.seq)
            .limit(limit)
        )
        async with self._database.writing() as connection:
            return (await connection.execute(delete(batches).where(batches.c.seq.in_(over)))).rowcount


async def _locked_state(connection: AsyncConnection, batch_id: str) -> int | None:
    query = select(batches.c.state).where(batches.c.id == batch_id).with_for_update()
    state: int | None = (await connection.execute(query)).scalar_one_or_none()
    return state


def _one(tenant: str, batch_id: str) -> Select[tuple[object, ...]]:
    return select(batches).where(batches.c.id == batch_id, batches.c.tenant == tenant, batches.c.state > RECEIVING)


def _batch_of(row: Row[tuple[object, ...]]) -> batch_pb.Batch:
    return batch_pb.Batch(
        id=row.id,
        tenant=row.tenant,
        state=row.state,
        endpoint=row.endpoint,
        input_file=row.input_file,
        output_file=row.output_file,
        error_file=row.error_file,
        errors=[batch_pb.BatchLineError(**error) for error in json.loads(row.errors)],
        metadata=json.loads(row.metadata),
        create_time=stamp_of(row.created_at),
        window_end_time=stamp_of(row.window_ends_at),
        cancel_time=optional_stamp(row.cancelled_at),
        lines_end_time=optional_stamp(row.lines_ended_at),
        end_time=optional_stamp(row.ended_at),
        **{name: getattr(row, name) for name in _COUNT_COLUMNS},
    )


def _error_json(error: batch_pb.BatchLineError) -> dict[str, object]:
    return {"code": error.code, "message": error.message, "line": error.line, "field": error.field}


CHANGED_AT_ONCE = 1_000
"""Items that one transaction changes or deletes; other writes run in between."""
ORIGIN = "batches"
"""Origin of batch events: the id of no listener, so that the engine of this very router receives them too."""
CANCELLED_MESSAGE = "its batch was cancelled"
_OPEN = (task_pb2.TASK_STATE_PENDING, task_pb2.TASK_STATE_RUNNING)


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

    @property
    def counts(self) -> dict[str, int]:
        """The counts of ended items, by their columns, which are the fields of a batch too."""
        return {
            "completed_count": self.completed,
            "failed_count": self.failed,
            "cancelled_count": self.cancelled,
            "expired_count": self.expired,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """An item without its spec and its answer."""

    task: task_pb2.Task
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
                .values(state=batch_pb.BATCH_STATE_IN_PROGRESS, total_count=total)
            )
            if not done.rowcount:
                return False
            await connection.execute(
                update(tasks)
                .where(tasks.c.batch_id == batch_id, tasks.c.state == STAGED)
                .values(state=task_pb2.TASK_STATE_PENDING, ready_at=READY_NOW)
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
            (tasks.c.state == task_pb2.TASK_STATE_COMPLETED, "completed"),
            (tasks.c.state == task_pb2.TASK_STATE_CANCELLED, "cancelled"),
            (and_(tasks.c.state == task_pb2.TASK_STATE_FAILED, is_expired), "expired"),
            (tasks.c.state == task_pb2.TASK_STATE_FAILED, "failed"),
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
        completed = [line.task.id for line in lines if line.task.state == task_pb2.TASK_STATE_COMPLETED]
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
            .values(state=task_pb2.TASK_STATE_CANCELLED, ended_at=now, owner="", lease_until=None)
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
