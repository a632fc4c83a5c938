"""Records of requests in a router's database: written in batches, found again after a restart and by the next leader.

A request under way is written once, and again when it ends. A router that dies leaves those under way behind: the next
one that leads marks them as lost with it. Nothing of it waits on the path of a request.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Double,
    String,
    Table,
    and_,
    bindparam,
    delete,
    func,
    or_,
    select,
    true,
    tuple_,
    update,
)
from sqlalchemy.dialects import sqlite
from sqlalchemy.ext.asyncio import AsyncConnection
from typing_extensions import override

from router_svc.durable.limits import RecordLimits
from router_svc.durable.tasks.sql_statements import DATABASE_TIME
from router_svc.request_entry import EndedRequest, RequestEntry
from router_svc.request_history import RequestHistory, StoredRequest
from router_svc.request_log import RequestLog, clear_quotes
from router_svc.store.database import RouterDatabase
from router_svc.store.tables import request_records, router_beats
from router_svc.unwritten_records import RecordBatch
from weft.api.common.v1 import receipt_pb2
from weft.api.router.v1.request_service_pb2 import (
    REQUEST_SELECTION_CANCELLED,
    REQUEST_SELECTION_COMPLETED,
    REQUEST_SELECTION_FAILED,
)
from weft.dispatch.remote_router import Selection
from weft.kernel.clock import CLOCK_MARGIN_SECONDS, Clock
from weft.kernel.names import new_id
from weft.kernel.reasons import Reason, reason_of
from weft.kernel.request import Priority

ROWS_AT_ONCE = 500
"""Requests of each kind that one transaction writes, and that one statement marks or deletes."""
MAX_WITH_ONE_ID = 20
"""Requests with one id that are looked through for the newest."""

_T = request_records.c
_IS_OPEN = _T.ended_at.is_(None)
_IS_LOST = _T.reason == Reason.ROUTER_LOST.value
_REASON_OF: Mapping[int, ColumnElement[bool]] = {
    REQUEST_SELECTION_COMPLETED: _T.reason == 0,
    REQUEST_SELECTION_CANCELLED: _T.reason == Reason.CANCELLED.value,
    REQUEST_SELECTION_FAILED: _T.reason.not_in([0, Reason.CANCELLED.value]),
}
"""What makes an ended request one of a selection; see `router_svc.request_servicer`."""

_PLACED_BEFORE = delete(request_records).where(
    _T.tenant == bindparam("the_tenant"),
    _T.request_id == bindparam("the_id"),
    _T.incarnation != bindparam("own"),
    or_(_IS_OPEN, _IS_LOST),
)
_LOST = (
    update(request_records)
    .where(_T.incarnation == bindparam("its_incarnation"), _T.key == bindparam("its_key"), _IS_OPEN)
    .values(
        ended_at=bindparam("end", type_=Double),
        number=bindparam("end_number", type_=BigInteger),
        reason=Reason.ROUTER_LOST.value,
        message=bindparam("words", type_=String),
    )
)
_AHEAD = (
    update(request_records)
    .where(_T.ended_at > bindparam("latest", type_=Double))
    .values(ended_at=bindparam("present", type_=Double))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """Who writes: a router, by a name that it keeps over restarts, and its process."""

    router: str
    incarnation: str

    @staticmethod
    def of(router: str) -> "Writer":
        """Return a new process of a router; a router without a name is the only one of its database."""
        return Writer(router=router or "router", incarnation=new_id("inc"))


class RequestStore(RequestHistory):
    """The requests in a database, whichever router led when they were placed."""

    def __init__(self, database: RouterDatabase, writer: Writer, settings: RecordLimits, clock: Clock) -> None:
        self._database = database
        self._writer = writer
        self._settings = settings
        self._clock = clock
        self._begin: _RowStatement | None = None
        self._end: _RowStatement | None = None

    # -- writing

    async def write(self, batch: RecordBatch) -> None:
        """Writes a batch in one transaction. Raises SERVICE_UNAVAILABLE."""
        own = self._writer.incarnation
        async with self._database.writing() as connection:
            if batch.placed_again:
                values = [{"the_tenant": tenant, "the_id": name, "own": own} for tenant, name in batch.placed_again]
                await connection.execute(_PLACED_BEFORE, values)
            if batch.begun:
                self._begin = self._begin or _RowStatement(connection, _upsert(connection, is_end=False))
                await self._begin.execute(connection, map(self._begun, batch.begun))
            if batch.ended:
                self._end = self._end or _RowStatement(connection, _upsert(connection, is_end=True))
                await self._end.execute(connection, map(self._ended, batch.ended))
            await self._beat(connection)

    async def leave(self) -> None:
        """Says that this router stops: what it has under way counts as lost with it from now on."""
        await self._database.change(delete(router_beats).where(router_beats.c.incarnation == self._writer.incarnation))

    async def _beat(self, connection: AsyncConnection) -> None:
        insert = insert_for(connection, router_beats).values(
            incarnation=self._writer.incarnation, router=self._writer.router, beat_at=await self._now(connection)
        )
        await connection.execute(
            insert.on_conflict_do_update(index_elements=["incarnation"], set_={"beat_at": insert.excluded.beat_at})
        )

    async def _now(self, connection: AsyncConnection) -> float:
        """Returns UTC by the one clock of all that write to the database."""
        if not self._database.is_shared:
            return self._clock.utc_now().timestamp()
        return float((await connection.execute(DATABASE_TIME)).scalar_one())

    def _begun(self, entry: RequestEntry) -> dict[str, object]:
        return {
            **self._common(entry, entry.arrived_wall.timestamp()),
            "number": 0,
            "ended_at": None,
            "reason": 0,
            "message": "",
            "cancelled_by": "",
            "decisions": b"",
            "receipt": None,
        }

    def _ended(self, ended: EndedRequest) -> dict[str, object]:
        return {
            **self._common(ended, ended.arrived_wall.timestamp()),
            "number": ended.number,
            "ended_at": ended.ended_wall.timestamp(),
            "reason": ended.reason.value,
            "message": ended.message,
            "cancelled_by": ended.cancelled_by,
            "decisions": ended.decisions,
            "receipt": _without_quotes(ended.receipt) if ended.quotes_content else ended.receipt,
        }

    def _common(self, entry: RequestEntry | EndedRequest, arrived_at: float) -> dict[str, object]:
        return {
            "incarnation": self._writer.incarnation,
            "key": entry.key,
            "router": self._writer.router,
            "request_id": entry.request_id,
            "tenant": entry.tenant,
            "client_id": entry.client_id,
            "target": entry.target,
            "asked_model": entry.asked_model,
            "priority": entry.priority.value,
            "arrived_at": arrived_at,
        }

    # -- what a router that ended left behind

    async def mark_lost(self) -> int:
        """Marks what earlier leaders had under way as lost with them; returns how many requests there were."""
        found = 0
        async with self._database.writing() as connection:
            while marked := await self._mark(connection, _T.incarnation != self._writer.incarnation):
                found += marked
            beats = router_beats.c
            await connection.execute(delete(router_beats).where(beats.incarnation != self._writer.incarnation))
        return found

    async def _mark(self, connection: AsyncConnection, scope: ColumnElement[bool]) -> int:
        beat_at = select(router_beats.c.beat_at).where(router_beats.c.incarnation == _T.incarnation).scalar_subquery()
        wanted = (
            select(_T.incarnation, _T.key, _T.router, _T.arrived_at, beat_at.label("beat_at"))
            .where(_IS_OPEN, scope)
            .order_by(_T.arrived_at, _T.incarnation, _T.key)
            .limit(ROWS_AT_ONCE)
            .with_for_update(skip_locked=True)
        )
        rows = (await connection.execute(wanted)).all()
        if not rows:
            return 0
        values = [
            {
                "its_incarnation": row.incarnation,
                "its_key": row.key,
                "end": max(row.arrived_at, row.beat_at or 0.0),
                "end_number": number,
                "words": f"the router {row.router} ended before the end of the request was recorded",
            }
            for number, row in enumerate(rows, await self._next_number(connection))
        ]
        await connection.execute(_LOST, values)
        return len(rows)

    async def _next_number(self, connection: AsyncConnection) -> int:
        return int((await connection.execute(select(func.max(_T.number)))).scalar() or 0) + 1

    # -- reading

    async def load(self, log: RequestLog, most: int, keep_seconds: float) -> Sequence[EndedRequest]:
        """Fills a new log with the last ended requests; returns them in the order of their ends."""
        now, wall = self._clock.monotonic(), self._clock.utc_now().timestamp()
        async with self._database.reading() as connection:
            number = await self._next_number(connection)
            rows = await connection.execute(
                select(request_records).where(_T.ended_at >= wall - keep_seconds).order_by(_T.number.desc()).limit(most)
            )
            ended = [_ended_of(row, -place, now - wall) for place, row in enumerate(rows, 1)]
        ended.reverse()
        for each in ended:
            # A clock that was set back must not keep one for longer.
            each.ended_at = min(each.ended_at, now)
        log.restore(ended, number)
        return ended

    @override
    async def find(self, request_id: str, tenant: str) -> StoredRequest | None:
        wanted = select(request_records).where(_T.request_id == request_id)
        if tenant:
            wanted = wanted.where(_T.tenant == tenant)
        rows = await self._database.rows(wanted.order_by(_T.arrived_at.desc()).limit(MAX_WITH_ONE_ID))
        row: Any = max(rows, key=lambda row: (not _lacks_end(row), row.arrived_at), default=None)
        if row is None:
            return None
        return StoredRequest(row.ended_at is None, _ended_of(row, row.key))

    @override
    async def older(
        self, limit: int, tenant: str, selection: Selection, before_number: int
    ) -> tuple[Sequence[EndedRequest], int]:
        condition = and_(_T.ended_at.is_not(None), _T.number < before_number, _REASON_OF.get(selection, true()))
        if tenant:
            condition = and_(condition, _T.tenant == tenant)
        async with self._database.reading() as connection:
            total = (
                await connection.execute(select(func.count()).select_from(request_records).where(condition))
            ).scalar_one()
            if not limit or not total:
                return [], int(total)
            wanted = select(request_records).where(condition).order_by(_T.ended_at.desc(), _T.number.desc())
            rows = (await connection.execute(wanted.limit(limit))).all()
        return [_ended_of(row, row.key) for row in rows], int(total)

    # -- retention

    async def sweep(self) -> None:
        """Deletes what is older than `keep_seconds`, or beyond `max_records`. Raises SERVICE_UNAVAILABLE."""
        now = self._clock.utc_now().timestamp()
        # Written while the clock was ahead, they would be kept for as much longer.
        await self._database.change(_AHEAD, latest=now + CLOCK_MARGIN_SECONDS, present=now)
        oldest = now - self._settings.keep_seconds
        beyond = await self._database.first(
            select(_T.ended_at)
            .where(_T.ended_at.is_not(None))
            .order_by(_T.ended_at.desc())
            .offset(self._settings.max_records)
            .limit(1)
        )
        condition = _T.ended_at < oldest
        if beyond is not None and beyond.ended_at >= oldest:
            condition = _T.ended_at <= beyond.ended_at
        chosen = (
            select(_T.incarnation, _T.key)
            .where(condition)
            .order_by(_T.ended_at)
            .limit(ROWS_AT_ONCE)
            .with_for_update(skip_locked=True)
        )
        wanted = delete(request_records).where(tuple_(_T.incarnation, _T.key).in_(chosen))
        while await self._database.change(wanted) == ROWS_AT_ONCE:
            pass


def _lacks_end(row: Any) -> bool:
    """Whether a row does not say how its request ended: it was lost, or its dispatcher left."""
    was_left = row.reason == Reason.CANCELLED and row.receipt is None and not row.cancelled_by
    return bool(row.reason == Reason.ROUTER_LOST or was_left)


def insert_for(connection: AsyncConnection, table: Table) -> Any:
    """Returns an insert that may say what becomes of a row that exists, in the dialect of a connection."""
    if connection.dialect.name == "postgresql":
        # Twenty modules that a mesh on SQLite does not need.
        from sqlalchemy.dialects import postgresql  # noqa: PLC0415

        return postgresql.insert(table)
    return sqlite.insert(table)


def _without_quotes(receipt: bytes | None) -> bytes | None:
    """Returns a receipt without what may quote a content."""
    if receipt is None:
        return None
    kept = receipt_pb2.Receipt.FromString(receipt)
    clear_quotes(kept)
    return kept.SerializeToString()


_KEYS = ("incarnation", "key")
_OF_THE_END = ("number", "ended_at", "reason", "message", "cancelled_by", "decisions", "receipt")


def _upsert(connection: AsyncConnection, *, is_end: bool) -> Any:
    new = insert_for(connection, request_records)
    if not is_end:
        return new.on_conflict_do_nothing(index_elements=_KEYS)
    return new.on_conflict_do_update(index_elements=_KEYS, set_={name: new.excluded[name] for name in _OF_THE_END})


class _RowStatement:
    """A statement for many rows, compiled once, whose values go to the driver as they are.

    SQLAlchemy would look at each of the 17 values of a row: measured, 25 us per row.
    """

    def __init__(self, connection: AsyncConnection, statement: Any) -> None:
        compiled = statement.compile(dialect=connection.dialect, column_keys=list(_T.keys()))
        assert compiled.positiontup is not None, "the drivers of SQLite and PostgreSQL take values by place"
        self._text = str(compiled)
        self._in_order = itemgetter(*compiled.positiontup)

    async def execute(self, connection: AsyncConnection, rows: Iterable[Mapping[str, object]]) -> None:
        """Executes it for each row, which has a value for every column. The values need no conversion."""
        await connection.exec_driver_sql(self._text, [self._in_order(row) for row in rows])


def _ended_of(row: Any, key: int, to_monotonic: float = 0.0) -> EndedRequest:
    """Returns the request of a row; `to_monotonic`: seconds from UTC to the clock of this process."""
    ended_at = row.arrived_at if row.ended_at is None else row.ended_at
    return EndedRequest(
        key=key,
        request_id=row.request_id,
        tenant=row.tenant,
        client_id=row.client_id,
        target=row.target,
        priority=Priority(row.priority),
        arrived_at=row.arrived_at + to_monotonic,
        arrived_wall=datetime.fromtimestamp(row.arrived_at, UTC),
        ended_at=ended_at + to_monotonic,
        reason=reason_of(row.reason),
        message=row.message,
        decisions=row.decisions,
        receipt=row.receipt,
        cancelled_by=row.cancelled_by,
        asked_model=row.asked_model,
        number=row.number,
    )
