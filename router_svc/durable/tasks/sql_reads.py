"""The reads of the task store on SQL. Each statement uses an index: `tests/contract/test_task_store_plans.py`."""

import hashlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, func, literal, select, tuple_
from typing_extensions import override

from router_svc.durable.tasks.sql_rows import STAGED, find, task_of
from router_svc.durable.tasks.sql_transitions import IS_PENDING, IS_RUNNING, lane_of
from router_svc.durable.tasks.store_port import Lane, PendingTask, TaskReads, TaskRow
from router_svc.store.database import RouterDatabase
from router_svc.store.tables import task_attempts, task_pieces, task_specs, tasks
from weft.api.common.v1 import error_reason_pb2, receipt_pb2
from weft.api.router.v1 import task_pb2
from weft.api.router.v1 import task_service_pb2 as pb
from weft.durable.tasks import DEFAULT_LISTED, MAX_LISTED, event_number
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import reason_of
from weft.kernel.timestamps import optional_stamp, stamp_of

MAX_CHUNKS_READ = 1_024
"""Chunks that one call returns."""
_LANE_ORDER = (tasks.c.model, tasks.c.tenant, tasks.c.band)
_TOKEN_MARK_BYTES = 8
_TOKEN_SEQ_BYTES = 8


class SqlTaskReads(TaskReads):
    """The reads of a task store on SQLAlchemy, each in a transaction of its own that waits for no writer."""

    def __init__(self, database: RouterDatabase) -> None:
        self._database = database

    @override
    async def submitted(self, row: TaskRow) -> pb.SubmitTaskResponse | None:
        async with self._database.reading() as connection:
            found = await find(connection, row)
        if isinstance(found, WeftError):
            raise found
        return found

    @override
    async def get(self, tenant: str, task_id: str) -> task_pb2.Task | None:
        async with self._database.reading() as connection:
            row = (await connection.execute(_owned(tenant, task_id))).first()
            return None if row is None else task_of(row)

    @override
    async def details(self, tenant: str, task_id: str) -> pb.GetTaskResponse | None:
        async with self._database.reading() as connection:
            row = (await connection.execute(_owned(tenant, task_id))).first()
            if row is None:
                return None
            kept = await connection.execute(select(task_specs.c.spec).where(task_specs.c.task_id == task_id))
            spec: bytes | None = kept.scalar_one_or_none()
            if spec is None:  # Deleted between the two statements.
                return None
            tried = select(task_attempts).where(task_attempts.c.task_id == task_id).order_by(task_attempts.c.attempt)
            attempts = [_attempt_of(each) for each in await connection.execute(tried)]
            details = pb.GetTaskResponse(task=task_of(row), attempts=attempts)
            details.spec.ParseFromString(spec)
            return details

    @override
    async def list_page(self, tenant: str, request: pb.ListTasksRequest) -> pb.ListTasksResponse:
        async with self._database.reading() as connection:
            size = max(1, min(request.page_size or DEFAULT_LISTED, MAX_LISTED))
            mark = _mark_of(tenant, request)
            before = _seq_of(request.page_token, mark) if request.page_token else None
            statement = _newest_first(connection.dialect.name, tenant, before).where(tasks.c.state != STAGED)
            if request.states:
                statement = statement.where(tasks.c.state.in_(sorted(set(request.states))))
            if request.model:
                statement = statement.where(tasks.c.model == request.model)
            if request.batch:
                statement = statement.where(tasks.c.batch_id == request.batch)
            rows = (await connection.execute(statement.limit(size + 1))).all()
            token = _token_of(rows[size - 1].seq, mark) if len(rows) > size else ""
            return pb.ListTasksResponse(
                tasks=[task_of(row) for row in rows[:size]], next_page_token=token, notice=self._database.notice
            )

    @override
    async def chunks(
        self, task_id: str, attempt: int, after_index: int, max_bytes: int
    ) -> Sequence[task_pb2.TaskPiece]:
        # Of a chunk that contains `after_index`, the rest.
        async with self._database.reading() as connection:
            c = task_pieces.c
            of_attempt = and_(c.task_id == task_id, c.attempt == attempt)
            # The next event may be inside the chunk that begins last before it.
            first = (
                select(func.max(c.first_index)).where(of_attempt, c.first_index <= after_index + 1).scalar_subquery()
            )
            sizes = (
                select(c.first_index, func.length(c.output).label("size"))
                .where(of_attempt, c.first_index >= func.coalesce(first, 0))
                .order_by(c.first_index)
                .limit(MAX_CHUNKS_READ)
            )
            chosen = _as_many_as_fit((await connection.execute(sizes)).all(), max_bytes)
            if not chosen:
                return ()
            whole = (
                select(c.first_index, c.event_count, c.output)
                .where(of_attempt, c.first_index.between(chosen[0].first_index, chosen[-1].first_index))
                .order_by(c.first_index)
            )
            found = [_chunk_of(row, attempt, after_index) for row in await connection.execute(whole)]
            return [chunk for chunk in found if chunk is not None]

    @override
    async def lanes(self, now: float, after: Lane | None, limit: int) -> Sequence[Lane]:
        # An index skip scan from each lane's first task to the next lane.
        async with self._database.reading() as connection:
            c = tasks.c
            ready = and_(IS_PENDING, c.ready_at <= now, c.expires_at > now)
            begin: ColumnElement[int]
            if after is None:
                begin = select(c.seq).where(ready).order_by(*_LANE_ORDER, c.seq).limit(1).scalar_subquery()
            else:
                begin = _first_after(ready, literal(after.model), literal(after.tenant), literal(after.band.value))
            lane = select(begin.label("seq"), literal(1).label("place")).cte("lane", recursive=True)
            this = tasks.alias("this")
            following = _first_after(ready, this.c.model, this.c.tenant, this.c.band)
            steps = lane.union_all(
                select(following, lane.c.place + 1)
                .join_from(lane, this, this.c.seq == lane.c.seq)
                .where(lane.c.place < limit)
            )
            found = select(steps.c.place, *_LANE_ORDER).join_from(steps, tasks, c.seq == steps.c.seq)
            # The database's order, not Python's: the next page begins after the last of these.
            rows = sorted((await connection.execute(found)).all(), key=lambda row: row.place)
            return [lane_of(row) for row in rows]

    @override
    async def pending(self, lane: Lane, now: float, limit: int, max_bytes: int) -> Sequence[PendingTask]:
        async with self._database.reading() as connection:
            c = tasks.c
            waiting = (
                select(
                    *(c.id, c.caller, c.attempt, c.failures, c.max_attempts, c.batch_id),
                    func.length(task_specs.c.spec).label("size"),
                )
                .join_from(tasks, task_specs, task_specs.c.task_id == c.id)
                .where(
                    IS_PENDING, c.model == lane.model, c.tenant == lane.tenant, c.ready_at <= now, c.expires_at > now
                )
                # BETWEEN instead of an equality, so that only one index has the order: with an equality PostgreSQL may
                # scan all tasks by `seq` until it has met enough of the lane.
                .where(c.band.between(lane.band.value, lane.band.value))
                .order_by(c.band, c.seq)
                .limit(limit)
            )
            chosen = _as_many_as_fit((await connection.execute(waiting)).all(), max_bytes)
            if not chosen:
                return ()
            wanted = select(task_specs.c.task_id, task_specs.c.spec).where(
                task_specs.c.task_id.in_([row.id for row in chosen])
            )
            specs = {row.task_id: row.spec for row in await connection.execute(wanted)}
            # Another router may have deleted one between the two statements.
            return [_pending_of(row, lane, specs[row.id]) for row in chosen if row.id in specs]

    @override
    async def next_ready_at(self, now: float) -> float | None:
        async with self._database.reading() as connection:
            query = (
                select(tasks.c.ready_at).where(IS_PENDING, tasks.c.ready_at > now).order_by(tasks.c.ready_at).limit(1)
            )
            moment: float | None = (await connection.execute(query)).scalar_one_or_none()
            return moment

    @override
    async def open_counts(self) -> Mapping[str, int]:
        async with self._database.reading() as connection:
            counts: dict[str, int] = {}
            for condition in (IS_PENDING, IS_RUNNING):
                query = select(tasks.c.tenant, func.count()).where(condition).group_by(tasks.c.tenant)
                for tenant, count in await connection.execute(query):
                    counts[tenant] = counts.get(tenant, 0) + count
            return counts

    async def database_now(self) -> float | None:
        """Returns the database's UTC seconds since the epoch; None on SQLite, which has one router.

        Leases are compared with the caller's `now`, which routers derive from this. Raises SERVICE_UNAVAILABLE.
        """
        if not self._database.is_shared:
            return None
        async with self._database.reading() as connection:
            now = select(func.date_part("epoch", func.clock_timestamp()))
            return float((await connection.execute(now)).scalar_one())


def _first_after(
    ready: ColumnElement[bool], model: ColumnElement[str], tenant: ColumnElement[str], band: ColumnElement[int]
) -> ColumnElement[int]:
    """The first ready task of the next lane.

    One subquery per column: SQLite evaluates a row comparison only after a scan of the whole lane.
    """
    c = tasks.c
    first = select(c.seq).where(ready).limit(1)
    return func.coalesce(
        first.where(c.model == model, c.tenant == tenant, c.band > band).order_by(c.band, c.seq).scalar_subquery(),
        first.where(c.model == model, c.tenant > tenant).order_by(c.tenant, c.band, c.seq).scalar_subquery(),
        first.where(c.model > model).order_by(*_LANE_ORDER, c.seq).scalar_subquery(),
    )


def _newest_first(dialect: str, tenant: str, before: int | None) -> Select[Any]:
    c = tasks.c
    if dialect == "sqlite":
        found = select(tasks).where(c.tenant == tenant).order_by(c.seq.desc())
        return found if before is None else found.where(c.seq < before)
    # As in `pending`: with an equality PostgreSQL may scan the tasks of all tenants.
    found = select(tasks).where(c.tenant >= tenant).order_by(c.tenant.desc(), c.seq.desc())
    if before is None:
        return found.where(c.tenant <= tenant)
    return found.where(tuple_(c.tenant, c.seq) < tuple_(literal(tenant), literal(before, c.seq.type)))


def _owned(tenant: str, task_id: str) -> Select[Any]:
    return select(tasks).where(tasks.c.id == task_id, tasks.c.tenant == tenant, tasks.c.state != STAGED)


def _as_many_as_fit(rows: Sequence[Any], max_bytes: int) -> Sequence[Any]:
    """Returns the first rows that fit, at least one if there is one."""
    total = 0
    for count, row in enumerate(rows):
        total += row.size
        if count and total > max_bytes:
            return rows[:count]
    return rows


def _attempt_of(row: Any) -> task_pb2.TaskAttempt:
    return task_pb2.TaskAttempt(
        attempt=row.attempt,
        owner=row.owner,
        claim_time=stamp_of(row.claimed_at),
        end_time=optional_stamp(row.ended_at),
        reason=error_reason_pb2.ErrorReason.ValueType(reason_of(row.reason)),
        message=row.message,
        receipt=receipt_pb2.Receipt.FromString(row.receipt) if row.receipt else None,
    )


def _chunk_of(row: Any, attempt: int, after_index: int) -> task_pb2.TaskPiece | None:
    last = row.first_index + row.event_count - 1
    if last <= after_index:
        return None
    piece = task_pb2.TaskPiece(attempt=attempt, last_event=event_number(attempt, last))
    piece.output.ParseFromString(row.output)
    del piece.output.events[: max(0, after_index + 1 - row.first_index)]
    return piece


def _pending_of(row: Any, lane: Lane, spec: bytes) -> PendingTask:
    return PendingTask(
        id=row.id,
        lane=lane,
        spec=spec,
        caller=row.caller,
        attempt=row.attempt,
        failures=row.failures,
        max_attempts=row.max_attempts,
        batch=row.batch_id,
    )


def _mark_of(tenant: str, request: pb.ListTasksRequest) -> bytes:
    """Returns a digest of the filters that a page token belongs to."""
    filters = repr((tenant, sorted(set(request.states)), request.model, request.batch))
    return hashlib.sha256(filters.encode("utf-8", "surrogatepass")).digest()[:_TOKEN_MARK_BYTES]


def _token_of(seq: int, mark: bytes) -> str:
    return urlsafe_b64encode(mark + seq.to_bytes(_TOKEN_SEQ_BYTES)).decode()


def _seq_of(token: str, mark: bytes) -> int:
    try:
        raw = urlsafe_b64decode(token.encode("ascii"))
    except (UnicodeEncodeError, Base64Error, ValueError):
        raw = b""
    seq = int.from_bytes(raw[_TOKEN_MARK_BYTES:])
    if len(raw) != _TOKEN_MARK_BYTES + _TOKEN_SEQ_BYTES or not raw.startswith(mark) or seq >= 1 << 63:
        raise invalid_field("page_token", "must be the next_page_token of the same query")
    return seq
