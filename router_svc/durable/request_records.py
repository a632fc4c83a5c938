"""Request records in a router's database: written in batches, and read after a restart or by the next leader.

A request is written once while under way and again when it ends. The next leader marks the unfinished requests of a
dead router as lost. No request waits for this.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from typing_extensions import override

from router_svc.durable.limits import RecordLimits
from router_svc.policy.router_request import Request
from router_svc.request_log import clear_quotes
from router_svc.request_record import EndedRequest, RequestHistory, begun_record, is_lost, mark_lost, was_left
from router_svc.store.database import RouterDatabase, time_of
from router_svc.unwritten_records import RecordBatch
from weft.api.router.v1 import request_pb2
from weft.api.router.v1.request_service_pb2 import (
    REQUEST_SELECTION_CANCELLED,
    REQUEST_SELECTION_COMPLETED,
    REQUEST_SELECTION_FAILED,
)
from weft.durable.requests import Selection
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import CLOCK_MARGIN_SECONDS, Clock
from weft.kernel.values.names import new_id
from weft.sql.connections import Tx
from weft.sql.statements import insert, upsert

ROWS_AT_ONCE = 500
"""Maximum requests of each kind written per transaction, and marked or deleted per statement."""
MAX_WITH_ONE_ID = 20
"""Maximum requests with one id searched for the newest."""

_LOST = Reason.ROUTER_LOST.value
_SELECTED: Mapping[int, str] = {
    REQUEST_SELECTION_COMPLETED: " AND reason = 0",
    REQUEST_SELECTION_CANCELLED: f" AND reason = {Reason.CANCELLED.value}",
    REQUEST_SELECTION_FAILED: f" AND reason NOT IN (0, {Reason.CANCELLED.value})",
}
"""Conditions that select ended requests; see `router_svc.request_servicer`."""

_KEYS = ("incarnation", "key")
_OF_THE_END = ("number", "ended_at", "reason", "record")
_ADD = insert("request_records", *_KEYS, "router", "request_id", "tenant", "arrived_at", *_OF_THE_END)
_BEGIN = f"{_ADD} ON CONFLICT (incarnation, key) DO NOTHING"
_END = f"""{_ADD} ON CONFLICT (incarnation, key) DO UPDATE SET
    {", ".join(f"{each} = excluded.{each}" for each in _OF_THE_END)}"""
_PLACED_BEFORE = f"""DELETE FROM request_records WHERE tenant = :tenant AND request_id = :id AND incarnation <> :own
    AND (ended_at IS NULL OR reason = {_LOST})"""
_MARK_LOST = f"""UPDATE request_records SET ended_at = :end, number = :number, reason = {_LOST}, record = :record
    WHERE incarnation = :incarnation AND key = :key AND ended_at IS NULL"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """The router that writes, by a name that is stable across restarts, and its process."""

    router: str
    incarnation: str

    @staticmethod
    def of(router: str) -> "Writer":
        """Return a new process of a router; a router without a name is the only one of its database."""
        return Writer(router=router or "router", incarnation=new_id("inc"))


class RequestStore(RequestHistory):
    """The requests in a database, from all leaders."""

    def __init__(self, database: RouterDatabase, writer: Writer, settings: RecordLimits, clock: Clock) -> None:
        self._database = database
        self._writer = writer
        self._settings = settings
        self._clock = clock

    # -- writing

    async def write(self, batch: RecordBatch) -> None:
        """Writes a batch in one transaction. Raises SERVICE_UNAVAILABLE."""
        own = self._writer.incarnation
        again = [{"tenant": tenant, "id": name, "own": own} for tenant, name in batch.placed_again]
        begun, ended = [*map(self._begun, batch.begun)], [*map(self._ended, batch.ended)]

        def put(tx: Tx) -> None:
            tx.many(_PLACED_BEFORE, again)
            tx.many(_BEGIN, begun)
            tx.many(_END, ended)
            beat = upsert("router_beats", "incarnation", "router", "beat_at")
            tx.execute(beat, incarnation=own, router=self._writer.router, beat_at=self._now(tx))

        await self._database.run(put)

    async def leave(self) -> None:
        """Records that this router stops: its unfinished requests now count as lost."""
        leave = "DELETE FROM router_beats WHERE incarnation = :own"
        await self._database.change(leave, own=self._writer.incarnation)

    def _now(self, tx: Tx) -> float:
        """Returns UTC from the clock shared by all writers of the database."""
        return time_of(tx) if self._database.is_shared else self._clock.utc_now().timestamp()

    def _begun(self, entry: Request) -> dict[str, object]:
        record = begun_record(entry.spec, entry.arrived_wall)
        return {
            **self._keys(entry.key),
            "request_id": record.request_id,
            "tenant": record.tenant,
            "arrived_at": entry.arrived_wall.timestamp(),
            "number": 0,
            "ended_at": None,
            "reason": 0,
            "record": record.SerializeToString(),
        }

    def _ended(self, ended: EndedRequest) -> dict[str, object]:
        return {
            **self._keys(ended.key),
            "request_id": ended.request_id,
            "tenant": ended.tenant,
            "arrived_at": ended.arrived_at,
            "number": ended.number,
            "ended_at": ended.ended_at,
            "reason": int(ended.reason),
            "record": _without_quotes(ended) if ended.quotes_content else ended.record,
        }

    def _keys(self, key: int) -> dict[str, object]:
        return {"incarnation": self._writer.incarnation, "key": key, "router": self._writer.router}

    # -- what a router that ended left behind

    async def mark_lost(self) -> int:
        """Marks unfinished requests of earlier leaders as lost; returns how many."""
        found = 0
        while marked := await self._database.run(self._mark):
            found += marked
        others = "DELETE FROM router_beats WHERE incarnation <> :own"
        await self._database.change(others, own=self._writer.incarnation)
        return found

    def _mark(self, tx: Tx) -> int:
        """Marks some of them; returns how many."""
        rows = tx.rows(
            """SELECT incarnation, key, router, arrived_at, record, (SELECT beat_at FROM router_beats
                WHERE router_beats.incarnation = request_records.incarnation) AS beat_at FROM request_records
            WHERE ended_at IS NULL AND incarnation <> :own ORDER BY arrived_at, incarnation, key LIMIT :limit""",
            own=self._writer.incarnation,
            limit=ROWS_AT_ONCE,
        )
        tx.many(_MARK_LOST, [_lost(row, number) for number, row in enumerate(rows, _next_number(tx))])
        return len(rows)

    # -- reading

    async def next_number(self) -> int:
        """Returns the number of the next end."""
        return await self._database.read(_next_number)

    @override
    async def find(self, request_id: str, tenant: str) -> request_pb2.RequestRecord | None:
        of_tenant = "AND tenant = :tenant" if tenant else ""
        rows = await self._database.rows(
            f"""SELECT record FROM request_records WHERE request_id = :id {of_tenant}
            ORDER BY arrived_at DESC LIMIT {MAX_WITH_ONE_ID}""",
            id=request_id,
            tenant=tenant,
        )
        # The newest first: of those without an end, and of those with one.
        records = [*map(_record_of, rows)]
        return next((each for each in records if not _lacks_end(each)), records[0] if records else None)

    @override
    async def older(
        self, limit: int, tenant: str, selection: Selection, before_number: int, placed_again: Collection[str]
    ) -> tuple[Sequence[request_pb2.RequestRecord], int]:
        wanted = f"FROM request_records WHERE ended_at IS NOT NULL AND number < :before{_SELECTED.get(selection, '')}"
        values: dict[str, Any] = {"before": before_number}
        if placed_again:
            # Otherwise an index has all that is counted.
            wanted += f" AND NOT (reason = {_LOST} AND request_id IN :again)"
            values["again"] = list(placed_again)
        if tenant:
            wanted, values = f"{wanted} AND tenant = :tenant", values | {"tenant": tenant}
        page = f"SELECT record {wanted} ORDER BY ended_at DESC, number DESC LIMIT :limit"
        total, rows = await self._database.read(
            lambda tx: (
                tx.value(f"SELECT count(*) {wanted}", **values),
                tx.rows(page, **values, limit=limit) if limit else (),
            )
        )
        return [*map(_record_of, rows)], total

    # -- retention

    async def sweep(self) -> None:
        """Deletes records older than `keep_seconds` or beyond `max_records`. Raises SERVICE_UNAVAILABLE."""
        now = self._clock.utc_now().timestamp()
        # Records written while the clock was ahead would be kept too long.
        ahead = "UPDATE request_records SET ended_at = :now WHERE ended_at > :latest"
        await self._database.change(ahead, now=now, latest=now + CLOCK_MARGIN_SECONDS)
        oldest, most = now - self._settings.keep_seconds, self._settings.max_records
        beyond = await self._database.value(
            """SELECT ended_at FROM request_records WHERE ended_at IS NOT NULL
            ORDER BY ended_at DESC LIMIT 1 OFFSET :most""",
            most=most,
        )
        is_over = "ended_at < :last"
        if beyond is not None and beyond >= oldest:
            is_over, oldest = "ended_at <= :last", beyond
        some = f"""DELETE FROM request_records WHERE (incarnation, key) IN
            (SELECT incarnation, key FROM request_records WHERE {is_over} ORDER BY ended_at LIMIT {ROWS_AT_ONCE})"""
        while await self._database.change(some, last=oldest) == ROWS_AT_ONCE:
            pass


def _lost(row: Any, number: int) -> dict[str, object]:
    """Returns the end of a row whose router ended."""
    record, end = _record_of(row), max(row.arrived_at, row.beat_at or 0.0)
    words = f"the router {row.router} ended before the end of the request was recorded"
    mark_lost(record, datetime.fromtimestamp(end, UTC), words)
    return {
        "incarnation": row.incarnation,
        "key": row.key,
        "end": end,
        "number": number,
        "record": record.SerializeToString(),
    }


def _lacks_end(record: request_pb2.RequestRecord) -> bool:
    """Whether the outcome of a request is unknown: it was lost, or its dispatcher left."""
    return is_lost(record) or was_left(record)


def _next_number(tx: Tx) -> int:
    return int(tx.value("SELECT max(number) FROM request_records") or 0) + 1


def _without_quotes(ended: EndedRequest) -> bytes:
    """Returns a record without parts of its receipt that may quote content."""
    record = ended.read()
    clear_quotes(record.receipt)
    return record.SerializeToString()


def _record_of(row: Any) -> request_pb2.RequestRecord:
    return request_pb2.RequestRecord.FromString(row.record)
