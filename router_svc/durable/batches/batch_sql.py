"""The store of batches and their items, which are rows of the task table; `batch_servicer` makes the decisions.

Every method raises SERVICE_UNAVAILABLE. Batches that are being received or deleted are invisible.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from google.protobuf.timestamp_pb2 import Timestamp

from router_svc.durable.files import is_kept
from router_svc.durable.tasks.sql_rows import NO_SEQ, READY_NOW, SPECS, STAGED, as_many_as_fit, insert_rows, task_of
from router_svc.durable.tasks.task_ends import ReportEnds, ignore_ends, settle
from router_svc.durable.tasks.task_records import EndedTask, NewTask
from router_svc.durable.webhooks.outbox import Outbox
from router_svc.store.database import RouterDatabase
from weft.api.router.v1 import batch_service_pb2 as batch_pb
from weft.api.router.v1 import task_pb2
from weft.durable.batches import BATCH_OUTPUT
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import CLOCK_MARGIN_SECONDS
from weft.kernel.time.timestamps import seconds_of, stamp_of
from weft.sql.connections import Row, Tx

RECEIVING = 0
"""State of a batch whose items are being received."""
DELETING = -1
"""State of an incomplete batch whose items are being deleted; items are no longer added."""
_BATCH = f"SELECT * FROM batches WHERE id = :id AND tenant = :tenant AND state > {RECEIVING}"
# Expired: failed at or after the end of the window, whether or not it had started.
_TALLIES = f"""
    SELECT batch_id, end_kind, count(*) AS number, max(ended_at) AS last FROM (
        SELECT batch_id, ended_at, CASE
            WHEN state = 3 THEN 'completed' WHEN state = 5 THEN 'cancelled'
            WHEN state = 4 AND error_reason = {Reason.DEADLINE_EXCEEDED.value} AND ended_at >= window_ends_at
            THEN 'expired' WHEN state = 4 THEN 'failed' ELSE 'open' END AS end_kind
        FROM tasks WHERE batch_id IN :ids) AS items
    GROUP BY batch_id, end_kind"""
_OUTPUTS = """
    SELECT task_id, output FROM task_pieces JOIN tasks
    ON tasks.id = task_pieces.task_id AND tasks.attempt = task_pieces.attempt
    WHERE task_id IN :ids ORDER BY task_id, first_index"""
_MOMENTS: "Mapping[str, Literal['create_time', 'lines_end_time', 'end_time']]" = MappingProxyType(
    {"created_at": "create_time", "lines_ended_at": "lines_end_time", "ended_at": "end_time"}
)
"""Fields of a batch with a separate column."""
_AHEAD = f"SELECT * FROM batches WHERE {' OR '.join(f'{each} > :later' for each in _MOMENTS)} LIMIT :limit"
CHANGED_AT_ONCE = 1_000
"""Maximum items changed or deleted per transaction, so that other writes run in between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemTally:
    """Numbers of a batch's items by their outcome."""

    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0
    open: int = 0
    last_ended_at: float | None = None

    def show_in(self, batch: batch_pb.Batch) -> None:
        """Sets the counts of a batch's ended items."""
        batch.completed_count, batch.failed_count = self.completed, self.failed
        batch.cancelled_count, batch.expired_count = self.cancelled, self.expired


class BatchStore:
    """A router's batches and their items."""

    def __init__(self, database: RouterDatabase) -> None:
        self._database = database
        self.report_ends: ReportEnds = ignore_ends
        """Called with the items that ended here, after each commit."""
        self.outbox = Outbox()
        """Gets the events about ended batches."""

    # -- batches

    async def count(self, tenant: str) -> int:
        """Returns the number of a tenant's batches, including those being received."""
        return int(await self._database.value("SELECT count(*) FROM batches WHERE tenant = :tenant", tenant=tenant))

    async def begin(self, batch: batch_pb.Batch) -> None:
        """Inserts a batch without items, or a failed one if it has errors."""

        def insert(tx: Tx) -> None:
            tx.insert("batches", _columns(batch) | ({} if batch.errors else {"state": RECEIVING}))
            if batch.errors:
                self.outbox.add_batch(tx, batch, seconds_of(batch.create_time))

        await self._database.run(insert)

    async def get(self, tenant: str, batch_id: str) -> batch_pb.Batch | None:
        """Returns a batch; counts of ended items are set only once all have ended."""
        found = await self._database.row(_BATCH, id=batch_id, tenant=tenant)
        return None if found is None else batch_of(found)

    async def list_page(self, tenant: str, after: str, limit: int) -> Sequence[batch_pb.Batch] | None:
        """Returns batches older than `after` (empty: all), newest first; None: the tenant has no batch `after`."""
        before = NO_SEQ
        if after:
            place = await self._database.row(_BATCH, id=after, tenant=tenant)
            if place is None:
                return None
            before = place.seq
        page = f"""SELECT * FROM batches WHERE tenant = :tenant AND state > {RECEIVING} AND seq < :before
            ORDER BY seq DESC LIMIT :limit"""
        return [batch_of(row) for row in await self._database.rows(page, tenant=tenant, before=before, limit=limit)]

    async def mark_cancelled(self, batch_id: str, now: float) -> bool:
        """Stores the time of a cancellation; False: all items had ended."""

        def cancel(batch: batch_pb.Batch) -> None:
            if not batch.HasField("cancel_time"):
                batch.cancel_time.CopyFrom(stamp_of(now))

        return await self._database.run(lambda tx: _change(tx, batch_id, batch_pb.BATCH_STATE_IN_PROGRESS, cancel))

    async def store_counts(self, batch_id: str, tally: ItemTally, lines_ended_at: float) -> None:
        """Stores the final counts of a batch after all items have ended. Written only once."""

        def count(batch: batch_pb.Batch) -> None:
            tally.show_in(batch)
            batch.state = batch_pb.BATCH_STATE_FINALIZING
            batch.lines_end_time.CopyFrom(stamp_of(lines_ended_at))

        await self._database.run(lambda tx: _change(tx, batch_id, batch_pb.BATCH_STATE_IN_PROGRESS, count))

    async def finish(self, tenant: str, batch_id: str, results: dict[str, str], now: float) -> str:
        """Stores the result files of a batch by field, unless already stored.

        Returns the field of a file that the tenant does not have; empty: all exist.
        """

        def store(tx: Tx) -> str:
            if tx.value("SELECT state FROM batches WHERE id = :id", id=batch_id) != batch_pb.BATCH_STATE_FINALIZING:
                return ""
            for field, file_id in results.items():
                if file_id and not is_kept(tx, tenant, file_id, BATCH_OUTPUT):
                    return field

            def end(batch: batch_pb.Batch) -> None:
                batch.output_file, batch.error_file = results["output_file"], results["error_file"]
                batch.state = batch_pb.BATCH_STATE_FINISHED
                batch.end_time.CopyFrom(stamp_of(now))
                self.outbox.add_batch(tx, batch, now)

            _change(tx, batch_id, batch_pb.BATCH_STATE_FINALIZING, end)
            return ""

        return await self._database.run(store)

    async def open_batches(self, after_seq: int, limit: int) -> Sequence[Row]:
        """Returns `seq` and `batch` of all tenants' batches without final counts, oldest first."""
        return await self._database.rows(
            "SELECT seq, batch FROM batches WHERE seq > :after AND state = :open ORDER BY seq LIMIT :limit",
            after=after_seq,
            open=batch_pb.BATCH_STATE_IN_PROGRESS,
            limit=limit,
        )

    async def unwritten(self, limit: int) -> Sequence[batch_pb.Batch]:
        """Returns all tenants' batches with ended items but unwritten results, oldest first."""
        found = await self._database.rows(
            "SELECT * FROM batches WHERE state = :finalizing ORDER BY seq LIMIT :limit",
            finalizing=batch_pb.BATCH_STATE_FINALIZING,
            limit=limit,
        )
        return [batch_of(row) for row in found]

    async def incomplete(self, before: float, limit: int) -> Sequence[str]:
        """Returns ids of incomplete batches that began before a time, oldest first."""
        found = await self._database.rows(
            f"SELECT id FROM batches WHERE state <= {RECEIVING} AND created_at < :before ORDER BY seq LIMIT :limit",
            before=before,
            limit=limit,
        )
        return [row.id for row in found]

    async def purge_ended(self, before: float, limit: int) -> int:
        """Deletes batches that ended before a time, or whose items did without written results; returns how many."""
        return await self._database.change(
            """DELETE FROM batches WHERE seq IN (SELECT seq FROM batches WHERE ended_at < :before
            OR (state = :finalizing AND lines_ended_at < :before) ORDER BY seq LIMIT :limit)""",
            before=before,
            limit=limit,
            finalizing=batch_pb.BATCH_STATE_FINALIZING,
        )

    async def bring_back(self, now: float, limit: int) -> int:
        """Moves times that a clock set back left in the future to now; returns how many batches."""

        def move(tx: Tx) -> int:
            found = tx.rows(_AHEAD, later=now + CLOCK_MARGIN_SECONDS, limit=limit)
            for row in found:
                batch = batch_of(row)
                ahead_seconds = max(getattr(row, column) or now for column in _MOMENTS) - now
                for _, moment in batch.ListFields():
                    if isinstance(moment, Timestamp):
                        moment.FromNanoseconds(moment.ToNanoseconds() - round(ahead_seconds * 1e9))
                tx.update("batches", "id", _columns(batch) | {"state": row.state})
            return len(found)

        return await self._database.run(move)

    # -- items

    async def open_count(self, tenant: str) -> int:
        """Returns the number of pending and running tasks of a tenant."""
        # One count per state, each with a partial index.
        of_state = "(SELECT count(*) FROM tasks WHERE tenant = :tenant AND state"
        return int(await self._database.value(f"SELECT {of_state} = 1) + {of_state} = 2)", tenant=tenant))

    async def add(self, batch_id: str, items: Sequence[NewTask]) -> bool:
        """Adds items to a batch; False: it is no longer being received."""

        def insert_items(tx: Tx) -> bool:
            if tx.value("SELECT state FROM batches WHERE id = :id", id=batch_id) != RECEIVING:
                return False
            insert_rows(tx, items, state=STAGED)
            return True

        return await self._database.run(insert_items)

    async def activate(self, batch_id: str, total: int) -> bool:
        """Makes all items pending. False: the batch was removed."""

        def begin(batch: batch_pb.Batch) -> None:
            batch.total_count = total

        def start(tx: Tx) -> bool:
            if not _change(tx, batch_id, RECEIVING, begin):
                return False
            tx.execute(
                f"UPDATE tasks SET state = 1, ready_at = {READY_NOW} WHERE batch_id = :id AND state = {STAGED}",
                id=batch_id,
            )
            return True

        return await self._database.run(start)

    async def drop(self, batch_id: str) -> None:
        """Deletes an incomplete batch and its items in several transactions; a complete one stays."""
        abandon = f"UPDATE batches SET state = {DELETING} WHERE id = :id AND state = {RECEIVING}"
        await self._database.change(abandon, id=batch_id)
        some = f"""DELETE FROM tasks WHERE seq IN
            (SELECT seq FROM tasks WHERE batch_id = :id AND state = {STAGED} ORDER BY line LIMIT :limit)"""

        def remove(tx: Tx) -> bool:
            if tx.value("SELECT state FROM batches WHERE id = :id", id=batch_id) != DELETING:
                return False
            if tx.execute(some, id=batch_id, limit=CHANGED_AT_ONCE):
                return True
            tx.execute("DELETE FROM batches WHERE id = :id", id=batch_id)
            return False

        while await self._database.run(remove):
            pass

    async def tallies(self, batch_ids: Sequence[str]) -> Mapping[str, ItemTally]:
        """Returns the item counts of several batches."""
        found: dict[str, dict[str, int]] = {batch_id: {} for batch_id in batch_ids}
        last: dict[str, float] = {}
        for row in await self._database.rows(_TALLIES, ids=list(batch_ids)):
            found[row.batch_id][row.end_kind] = row.number
            if row.last is not None:
                last[row.batch_id] = max(row.last, last.get(row.batch_id, row.last))
        return {batch_id: ItemTally(**ends, last_ended_at=last.get(batch_id)) for batch_id, ends in found.items()}

    async def cancel_some(self, batch_id: str, now: float, limit: int) -> int:
        """Cancels some open items; returns how many."""
        chosen = "SELECT id FROM tasks WHERE batch_id = :batch AND state IN (1, 2) ORDER BY line LIMIT :limit"

        def cancel(tx: Tx) -> list[EndedTask]:
            values: dict[str, Any] = {"batch": batch_id, "limit": limit, "now": now}
            tx.execute(
                f"""UPDATE task_attempts SET ended_at = :now, reason = :reason, message = 'its batch was cancelled'
                WHERE ended_at IS NULL AND task_id IN ({chosen})""",
                **values,
                reason=Reason.CANCELLED.value,
            )
            cancelled = tx.rows(
                f"""UPDATE tasks SET state = :state, ended_at = :now, owner = '', lease_until = NULL, error_reason = 0,
                error_message = '' WHERE id IN ({chosen}) RETURNING *""",
                **values,
                state=task_pb2.TASK_STATE_CANCELLED,
            )
            return settle(tx, cancelled, now)

        ended = await self._database.run(cancel)
        self.report_ends(ended)
        return len(ended)

    async def results(
        self, batch_id: str, after_line: int, limit: int, max_bytes: int
    ) -> tuple[Sequence[batch_pb.ReadBatchResultsResponse], int | None]:
        """Returns items after a line number with their answers in order, and the last line number; None: no items.

        Returns as many as fit, at least one. An item that is purged meanwhile is omitted.
        """

        def read(tx: Tx) -> tuple[Sequence[batch_pb.ReadBatchResultsResponse], int | None]:
            found = tx.rows(
                f"""SELECT tasks.*, length(spec) + result_size AS size FROM tasks JOIN task_specs ON task_id = id
                WHERE batch_id = :batch AND line > :after AND state <> {STAGED} ORDER BY line LIMIT :limit""",
                batch=batch_id,
                after=after_line,
                limit=limit,
            )
            items = as_many_as_fit(found, max_bytes)
            outputs: dict[str, list[bytes]] = {}
            for row in tx.rows(_OUTPUTS, ids=[row.id for row in items if row.state == task_pb2.TASK_STATE_COMPLETED]):
                outputs.setdefault(row.task_id, []).append(row.output)
            specs = {row.task_id: row.spec for row in tx.rows(SPECS, ids=[row.id for row in items])}
            results: list[batch_pb.ReadBatchResultsResponse] = []
            for row in items:
                if row.id not in specs:
                    continue
                origin, custom_id = task_pb2.TaskSpec.FromString(specs[row.id]).origin, row.custom_id
                results.append(batch_pb.ReadBatchResultsResponse(task=task_of(row), custom_id=custom_id, origin=origin))
                pieces = map(task_pb2.TaskOutput.FromString, outputs.get(row.id, ()))
                results += (batch_pb.ReadBatchResultsResponse(output=piece) for piece in pieces)
            return results, items[-1].line if items else None

        return await self._database.read(read)


def batch_of(row: Row) -> batch_pb.Batch:
    """Returns the batch of a row."""
    return batch_pb.Batch.FromString(row.batch)


def _columns(batch: batch_pb.Batch) -> dict[str, Any]:
    """Returns the columns of a batch: those used in statements, and the message."""
    values: dict[str, Any] = {
        "id": batch.id,
        "tenant": batch.tenant,
        "state": batch.state,
        "batch": batch.SerializeToString(),
    }
    for column, field in _MOMENTS.items():
        values[column] = getattr(batch, field).ToNanoseconds() / 1e9 if batch.HasField(field) else None
    return values


def _change(tx: Tx, batch_id: str, state: int, change: Callable[[batch_pb.Batch], None]) -> bool:
    """Changes a batch in this state; False: it is in another state, or deleted."""
    row = tx.row("SELECT batch FROM batches WHERE id = :id AND state = :state", id=batch_id, state=state)
    if row is None:
        return False
    batch = batch_of(row)
    change(batch)
    tx.update("batches", "id", _columns(batch))
    return True
