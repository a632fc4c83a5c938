"""The table of batches on SQL; items are in `item_sql`, decisions in `batch_manager`.

Every method raises SERVICE_UNAVAILABLE. Batches that are being received or deleted are not visible.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from sqlalchemy import Row, Select, and_, delete, func, insert, or_, select, true, update
from sqlalchemy.ext.asyncio import AsyncConnection

from router_svc.durable.batches.files import is_kept
from router_svc.durable.tasks.sql_rows import utc
from router_svc.store.database import RouterDatabase
from router_svc.store.tables import batches
from weft.durable.batches import Batch, BatchState, LineCounts, LineError, NewBatch
from weft.durable.files import BATCH_OUTPUT
from weft.sql.moments import BoundedMoment, bring_back

RECEIVING = 0
"""State of a batch whose items are being received."""
DELETING = -1
"""State of an incomplete batch whose items are being deleted; no item is added any more."""
_COUNTS = ("total", "completed", "failed", "cancelled", "expired")


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

    async def begin(self, batch_id: str, new: NewBatch, now: float) -> None:
        """Inserts a batch without items, or a failed one if it has errors."""
        values = {
            "id": batch_id,
            "tenant": new.tenant,
            "state": BatchState.FAILED if new.errors else RECEIVING,
            "endpoint": new.endpoint,
            "input_file": new.input_file,
            "output_file": "",
            "error_file": "",
            "metadata": json.dumps(dict(new.metadata)).encode(),
            "errors": json.dumps([asdict(error) for error in new.errors]).encode(),
            **{f"{name}_count": 0 for name in _COUNTS},
            "created_at": now,
            "window_ends_at": new.window_ends_at.timestamp(),
            "ended_at": now if new.errors else None,
        }
        async with self._database.writing() as connection:
            await connection.execute(insert(batches), values)

    async def get(self, tenant: str, batch_id: str) -> Batch | None:
        """Returns a batch; the counts of ended items are set only once all have ended."""
        async with self._database.reading() as connection:
            found = (await connection.execute(_one(tenant, batch_id))).first()
        return None if found is None else _batch_of(found)

    async def list_page(self, tenant: str, after: str, limit: int) -> Sequence[Batch] | None:
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
                .where(batches.c.id == batch_id, batches.c.state == BatchState.IN_PROGRESS)
                .values(cancelled_at=func.coalesce(batches.c.cancelled_at, now))
            )
            return done.rowcount > 0

    async def store_counts(self, batch_id: str, counts: LineCounts, lines_ended_at: float) -> None:
        """Stores the final counts of a batch whose items have all ended. Written once."""
        async with self._database.writing() as connection:
            await connection.execute(
                update(batches)
                .where(batches.c.id == batch_id, batches.c.state == BatchState.IN_PROGRESS)
                .values(
                    state=BatchState.FINALIZING,
                    lines_ended_at=lines_ended_at,
                    **{f"{name}_count": getattr(counts, name) for name in _COUNTS if name != "total"},
                )
            )

    async def finish(self, tenant: str, batch_id: str, results: dict[str, str], now: float) -> str:
        """Stores the result files of a batch, by column, unless they are stored already.

        Returns the column of a file that the tenant does not have; empty: all exist.
        """
        async with self._database.writing() as connection:
            state = await _locked_state(connection, batch_id)
            if state != BatchState.FINALIZING:
                return ""
            for column, file_id in results.items():
                if file_id and not await is_kept(connection, tenant, file_id, BATCH_OUTPUT):
                    return column
            values = {"state": BatchState.FINISHED, "ended_at": now, **results}
            await connection.execute(update(batches).where(batches.c.id == batch_id).values(values))
            return ""

    async def open_batches(self, after_seq: int, limit: int) -> Sequence[OpenBatch]:
        """Returns batches of all tenants without final counts, oldest first."""
        query = (
            select(batches.c.seq, batches.c.tenant, batches.c.id, batches.c.cancelled_at)
            .where(batches.c.seq > after_seq, batches.c.state == BatchState.IN_PROGRESS)
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
                    and_(batches.c.state == BatchState.FINALIZING, batches.c.lines_ended_at < before),
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


def _batch_of(row: Row[tuple[object, ...]]) -> Batch:
    return Batch(
        id=row.id,
        tenant=row.tenant,
        state=BatchState(row.state),
        endpoint=row.endpoint,
        input_file=row.input_file,
        output_file=row.output_file,
        error_file=row.error_file,
        errors=tuple(LineError(**error) for error in json.loads(row.errors)),
        counts=LineCounts(**{name: getattr(row, f"{name}_count") for name in _COUNTS}),
        metadata=json.loads(row.metadata),
        created_at=utc(row.created_at),
        window_ends_at=utc(row.window_ends_at),
        cancelled_at=None if row.cancelled_at is None else utc(row.cancelled_at),
        lines_ended_at=None if row.lines_ended_at is None else utc(row.lines_ended_at),
        ended_at=None if row.ended_at is None else utc(row.ended_at),
    )
