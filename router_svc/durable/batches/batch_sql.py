"""The store of batches and of their items, which are rows of the task table; decisions are in `batch_manager`.

Every method raises SERVICE_UNAVAILABLE. Batches that are being received or deleted are not visible.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Executable, Row, true
from sqlalchemy.ext.asyncio import AsyncConnection

from router_svc.durable import statements
from router_svc.durable.batches.files import is_kept
from router_svc.durable.tasks import sql_statements
from router_svc.durable.tasks.sql_rows import insert_rows, task_of
from router_svc.durable.tasks.store_port import TaskRow
from router_svc.durable.usage_entries import add_entries, ended_without_receipt
from router_svc.store.database import RouterDatabase
from router_svc.store.tables import batches
from weft.api.common.v1 import receipt_pb2
from weft.api.router.v1 import batch_service_pb2 as batch_pb
from weft.api.router.v1 import task_pb2
from weft.durable.batches import BATCH_OUTPUT
from weft.kernel.timestamps import datetime_of, optional_stamp, stamp_of
from weft.sql.moments import BoundedMoment, bring_back

CHANGED_AT_ONCE = 1_000
"""Items that one transaction changes or deletes; other writes run in between."""


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
        """The counts of ended items, by `statements.COUNT_COLUMNS`."""
        return {name: getattr(self, name.removesuffix("_count")) for name in statements.COUNT_COLUMNS}


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


class BatchStore:
    """The batches of a router and their items."""

    def __init__(self, database: RouterDatabase) -> None:
        self._database = database

    # -- batches

    async def count(self, tenant: str) -> int:
        """Returns the number of a tenant's batches, including those being received."""
        return await self._number(statements.BATCH_COUNT, tenant)

    async def begin(self, batch: batch_pb.Batch, now: float) -> None:
        """Inserts a batch without items, or a failed one if it has errors."""
        values = {
            "id": batch.id,
            "tenant": batch.tenant,
            "state": batch_pb.BATCH_STATE_FAILED if batch.errors else statements.RECEIVING,
            "endpoint": batch.endpoint,
            "input_file": batch.input_file,
            "output_file": "",
            "error_file": "",
            "metadata": json.dumps(dict(batch.metadata)).encode(),
            "errors": json.dumps([_error_json(error) for error in batch.errors]).encode(),
            "total_count": 0,
            **dict.fromkeys(statements.COUNT_COLUMNS, 0),
            "created_at": now,
            "window_ends_at": datetime_of(batch.window_end_time).timestamp(),
            "ended_at": now if batch.errors else None,
        }
        await self._database.change(statements.BEGIN_BATCH, **values)

    async def get(self, tenant: str, batch_id: str) -> batch_pb.Batch | None:
        """Returns a batch; the counts of ended items are set only once all have ended."""
        found = await self._database.first(statements.BATCH, the_id=batch_id, the_tenant=tenant)
        return None if found is None else _batch_of(found)

    async def list_page(self, tenant: str, after: str, limit: int) -> Sequence[batch_pb.Batch] | None:
        """Returns batches, newest first, older than `after` (empty: all); None: the tenant has no batch `after`."""
        place = await self._database.first(statements.BATCH, the_id=after, the_tenant=tenant) if after else None
        if after and place is None:
            return None
        page = statements.batches_page(None if place is None else place.seq)
        return [_batch_of(row) for row in await self._database.rows(page, the_tenant=tenant, the_limit=limit)]

    async def mark_cancelled(self, batch_id: str, now: float) -> bool:
        """Stores the time of a cancellation; False: all items had ended already."""
        return await self._database.change(statements.CANCEL_BATCH, the_id=batch_id, the_time=now) > 0

    async def store_counts(self, batch_id: str, tally: ItemTally, lines_ended_at: float) -> None:
        """Stores the final counts of a batch whose items have all ended. Written once."""
        counts = {f"the_{name}": count for name, count in tally.counts.items()}
        await self._database.change(statements.END_BATCH_ITEMS, the_id=batch_id, the_time=lines_ended_at, **counts)

    async def finish(self, tenant: str, batch_id: str, results: dict[str, str], now: float) -> str:
        """Stores the result files of a batch, by column, unless they are stored already.

        Returns the column of a file that the tenant does not have; empty: all exist.
        """
        async with self._database.writing() as connection:
            found = (await connection.execute(statements.LOCK_BATCH, {"the_id": batch_id})).first()
            if found is None or found.state != batch_pb.BATCH_STATE_FINALIZING:
                return ""
            for column, file_id in results.items():
                if file_id and not await is_kept(connection, tenant, file_id, BATCH_OUTPUT):
                    return column
            files = {f"the_{column}": file_id for column, file_id in results.items()}
            await connection.execute(statements.FINISH_BATCH, {"the_id": batch_id, "the_time": now, **files})
            return ""

    async def open_batches(self, after_seq: int, limit: int) -> Sequence[Row[tuple[Any, ...]]]:
        """Returns `seq`, `id` and `cancelled_at` of batches of all tenants without final counts, oldest first."""
        return await self._database.rows(statements.OPEN_BATCHES, the_seq=after_seq, the_limit=limit)

    async def incomplete(self, before: float, limit: int) -> Sequence[str]:
        """Returns ids of incomplete batches that were begun before a time, oldest first."""
        found = await self._database.rows(statements.INCOMPLETE_BATCHES, the_time=before, the_limit=limit)
        return [row.id for row in found]

    async def purge_ended(self, before: float, limit: int) -> int:
        """Deletes batches that ended before a time, or whose items did without written results; returns how many."""
        return await self._database.change(statements.PURGE_BATCHES, the_time=before, the_limit=limit)

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

    # -- items

    async def open_count(self, tenant: str) -> int:
        """Returns the number of pending and running tasks of a tenant."""
        return sum([await self._number(statement, tenant) for statement in statements.OPEN_TASK_COUNTS])

    async def add(self, batch_id: str, rows: Sequence[TaskRow]) -> bool:
        """Adds items to a batch that is being received. False: it is not any more."""
        async with self._database.writing() as connection:
            if (await connection.execute(statements.LOCK_RECEIVING_BATCH, {"the_id": batch_id})).first() is None:
                return False
            await insert_rows(connection, rows, state=sql_statements.STAGED)
            return True

    async def activate(self, batch_id: str, total: int) -> bool:
        """Makes all items pending. False: the batch was removed."""
        values = {"the_id": batch_id, "the_total": total}
        async with self._database.writing() as connection:
            if not (await connection.execute(statements.ACTIVATE_BATCH, values)).rowcount:
                return False
            await connection.execute(statements.ACTIVATE_ITEMS, {"the_id": batch_id})
            return True

    async def drop(self, batch_id: str) -> None:
        """Deletes an incomplete batch with its items, some at a time; a complete one stays."""
        this = {"the_id": batch_id}
        await self._database.change(statements.ABANDON_BATCH, **this)
        more = True
        while more:
            async with self._database.writing() as connection:
                if (await connection.execute(statements.ABANDONED_BATCH, this)).first() is None:
                    return
                some = {**this, "the_limit": CHANGED_AT_ONCE}
                more = (await connection.execute(statements.DELETE_ITEMS, some)).rowcount > 0
                if not more:
                    await connection.execute(statements.DELETE_BATCH, this)

    async def tallies(self, batch_ids: Sequence[str]) -> Mapping[str, ItemTally]:
        """Returns the item counts of some batches."""
        found: dict[str, dict[str, int]] = {batch_id: {} for batch_id in batch_ids}
        last: dict[str, float] = {}
        for row in await self._database.rows(statements.ITEM_TALLIES, the_ids=batch_ids):
            found[row.batch_id][row.end_kind] = row.number
            if row.last is not None:
                last[row.batch_id] = max(row.last, last.get(row.batch_id, row.last))
        return {batch_id: ItemTally(**ends, last_ended_at=last.get(batch_id)) for batch_id, ends in found.items()}

    async def cancel_some(self, batch_id: str, now: float, limit: int) -> int:
        """Cancels some open items, except rows that are locked by another transaction; returns how many."""
        async with self._database.writing() as connection:
            found = await connection.execute(statements.OPEN_ITEMS, {"the_id": batch_id, "the_limit": limit})
            return await self._cancel(connection, [row.id for row in found], now)

    async def cancel_next(self, batch_id: str, now: float) -> bool:
        """Cancels one item, waiting for its lock; False: every item has ended."""
        async with self._database.writing() as connection:
            found = await connection.execute(statements.ONE_OPEN_ITEM, {"the_id": batch_id})
            ids = [row.id for row in found]
            await self._cancel(connection, ids, now)
            return bool(ids)

    async def page(self, batch_id: str, after_line: int, limit: int) -> Sequence[Item]:
        """Returns items after a line number, in order."""
        found = await self._database.rows(statements.ITEMS, the_id=batch_id, the_line=after_line, the_limit=limit)
        return [Item(task=task_of(row), custom_id=row.custom_id, size=row.spec_size + row.result_size) for row in found]

    async def contents(self, items: Sequence[Item]) -> Mapping[str, ItemContent]:
        """Returns specs and answers of items, by task id, without those that were purged meanwhile."""
        completed = [item.task.id for item in items if item.task.state == task_pb2.TASK_STATE_COMPLETED]
        outputs: dict[str, list[bytes]] = {task_id: [] for task_id in completed}
        async with self._database.reading() as connection:
            for row in await connection.execute(statements.ITEM_OUTPUTS, {"the_ids": completed}):
                outputs[row.task_id].append(row.output)
            # After the chunks: a task that still has its spec had all its chunks then.
            specs = await connection.execute(sql_statements.SPECS, {"the_ids": [item.task.id for item in items]})
            return {row.task_id: ItemContent(spec=row.spec, outputs=outputs.get(row.task_id, ())) for row in specs}

    async def _cancel(self, connection: AsyncConnection, task_ids: Sequence[str], now: float) -> int:
        if not task_ids:
            return 0
        values = {"the_ids": task_ids, "the_time": now}
        cancelled = (await connection.execute(statements.CANCEL_ITEMS, values)).all()
        running = {row.task_id for row in await connection.execute(statements.CANCEL_ATTEMPTS, values)}
        of_batch = receipt_pb2.OUTCOME_CANCELLED
        await add_entries(
            connection,
            [ended_without_receipt(row, now, of_batch, was_running=row.id in running) for row in cancelled],
        )
        return len(cancelled)

    async def _number(self, statement: Executable, tenant: str) -> int:
        found = await self._database.first(statement, the_tenant=tenant)
        assert found is not None, "a count without groups is one row"
        return int(found.number)


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
        total_count=row.total_count,
        **{name: getattr(row, name) for name in statements.COUNT_COLUMNS},
    )


def _error_json(error: batch_pb.BatchLineError) -> dict[str, object]:
    return {"code": error.code, "message": error.message, "line": error.line, "field": error.field}
