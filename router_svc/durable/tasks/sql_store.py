"""The task store on a router's database, SQLite or PostgreSQL; its SQL is named in `sql_statements`."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, ClassVar, TypeVar

from sqlalchemy import ColumnElement, Row
from sqlalchemy.ext.asyncio import AsyncConnection
from typing_extensions import override

from router_svc.durable.tasks import sql_rows, sql_statements
from router_svc.durable.tasks.sql_rows import lane_of, task_of
from router_svc.durable.tasks.store_port import (
    Claim,
    ExpiredLease,
    Lane,
    NewChunk,
    PendingTask,
    StateCount,
    TaskOutcome,
    TaskReads,
    TaskRow,
    TaskStore,
)
from router_svc.durable.usage_entries import add_entries, ended_attempt, ended_without_receipt
from router_svc.policy.task_release import KeptTasks, Release
from router_svc.store.database import RouterDatabase
from router_svc.store.group_commit import GroupCommit
from weft.api.common.v1 import receipt_pb2
from weft.api.router.v1 import task_pb2
from weft.api.router.v1 import task_service_pb2 as pb
from weft.durable.tasks import DEFAULT_LISTED, MAX_LISTED, task_error
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.sql.moments import bring_back, is_any_ahead

MAX_CHUNKS_READ = 1_024
"""Chunks that one call returns."""
_OUTCOMES: "Mapping[int, receipt_pb2.Outcome.ValueType]" = {
    task_pb2.TASK_STATE_COMPLETED: receipt_pb2.OUTCOME_COMPLETED,
    task_pb2.TASK_STATE_FAILED: receipt_pb2.OUTCOME_FAILED,
    task_pb2.TASK_STATE_CANCELLED: receipt_pb2.OUTCOME_CANCELLED,
}
"""How a task that ended without a receipt counts."""
_BY_OWNER = task_error(Reason.CANCELLED, "it was cancelled")

Done = TypeVar("Done")


_STATES = tuple(number for number in task_pb2.TaskState.values() if number)


class SqlTaskReads(TaskReads):
    """The reads of a task store: each is a transaction of its own that waits for no writer."""

    def __init__(self, database: RouterDatabase) -> None:
        self._database = database

    @override
    async def submitted(self, row: TaskRow) -> pb.SubmitTaskResponse | None:
        if not row.idempotency_key:
            return None
        async with self._database.reading() as connection:
            kept = await _with_keys(connection, [row])
        found = sql_rows.submission_of(row, kept) if kept else None
        if isinstance(found, WeftError):
            raise found
        return found

    @override
    async def get(self, tenant: str, task_id: str) -> task_pb2.Task | None:
        row = await self._database.first(sql_statements.TASK, the_id=task_id, the_tenant=tenant)
        return None if row is None else task_of(row)

    @override
    async def details(self, tenant: str, task_id: str) -> pb.GetTaskResponse | None:
        async with self._database.reading() as connection:
            this = {"the_id": task_id, "the_tenant": tenant}
            row = (await connection.execute(sql_statements.TASK, this)).first()
            if row is None:
                return None
            kept = (await connection.execute(sql_statements.SPECS, {"the_ids": [task_id]})).first()
            if kept is None:  # Deleted between the two statements.
                return None
            tried = await connection.execute(sql_statements.ATTEMPTS, {"the_id": task_id})
            attempts = [sql_rows.attempt_of(each) for each in tried]
            details = pb.GetTaskResponse(task=task_of(row), attempts=attempts)
            details.spec.ParseFromString(kept.spec)
            return details

    @override
    async def list_page(self, tenant: str, request: pb.ListTasksRequest) -> pb.ListTasksResponse:
        size = max(1, min(request.page_size or DEFAULT_LISTED, MAX_LISTED))
        mark = sql_rows.mark_of(tenant, request)
        before = sql_rows.seq_of(request.page_token, mark) if request.page_token else None
        async with self._database.reading() as connection:
            page = sql_statements.tasks_page(connection.dialect.name, before, request)
            rows = (await connection.execute(page, {"the_tenant": tenant, "the_limit": size + 1})).all()
        token = sql_rows.token_of(rows[size - 1].seq, mark) if len(rows) > size else ""
        return pb.ListTasksResponse(
            tasks=[task_of(row) for row in rows[:size]], next_page_token=token, notice=self._database.notice
        )

    @override
    async def chunks(
        self, task_id: str, attempt: int, after_index: int, max_bytes: int
    ) -> Sequence[task_pb2.TaskPiece]:
        # Of a chunk that contains `after_index`, the rest.
        async with self._database.reading() as connection:
            this = {"the_id": task_id, "the_attempt": attempt}
            found = await connection.execute(
                sql_statements.PIECE_SIZES, {**this, "the_index": after_index + 1, "the_limit": MAX_CHUNKS_READ}
            )
            chosen = _as_many_as_fit(found.all(), max_bytes)
            if not chosen:
                return ()
            whole = {**this, "the_index": chosen[0].first_index, "the_last": chosen[-1].first_index}
            rows = await connection.execute(sql_statements.PIECES, whole)
            pieces = [sql_rows.piece_of(row, attempt, after_index) for row in rows]
            return [piece for piece in pieces if piece is not None]

    @override
    async def lanes(self, now: float, after: Lane | None, limit: int) -> Sequence[Lane]:
        values: dict[str, object] = {"the_time": now, "the_limit": limit}
        if after is None:
            found = await self._database.rows(sql_statements.LANES, **values)
        else:
            values |= sql_rows.lane_parameters(after)
            found = await self._database.rows(sql_statements.LANES_AFTER, **values)
        # The database's order, not Python's: the next page begins after the last of these.
        return [lane_of(row) for row in sorted(found, key=lambda row: row.place)]

    @override
    async def pending(self, lane: Lane, now: float, limit: int, max_bytes: int) -> Sequence[PendingTask]:
        async with self._database.reading() as connection:
            values = {"the_time": now, "the_limit": limit, **sql_rows.lane_parameters(lane)}
            chosen = _as_many_as_fit((await connection.execute(sql_statements.PENDING_TASKS, values)).all(), max_bytes)
            if not chosen:
                return ()
            found = await connection.execute(sql_statements.SPECS, {"the_ids": [row.id for row in chosen]})
            specs = {row.task_id: row.spec for row in found}
            # Another router may have deleted one between the two statements.
            return [sql_rows.pending_of(row, lane, specs[row.id]) for row in chosen if row.id in specs]

    @override
    async def next_ready_at(self, now: float) -> float | None:
        found = await self._database.first(sql_statements.NEXT_READY, the_time=now)
        return None if found is None else float(found.ready_at)

    @override
    async def open_of_request(self, request_id: str, limit: int) -> Sequence[task_pb2.Task]:
        found = await self._database.rows(sql_statements.OPEN_OF_REQUEST, the_request_id=request_id, the_limit=limit)
        return [task_of(row) for row in sorted(found, key=lambda row: row.seq)]

    @override
    async def kept_counts(self) -> Mapping[str, KeptTasks]:
        found = await self._database.rows(sql_statements.KEPT_COUNTS)
        return {row.tenant: KeptTasks(count=row.number, size=int(row.size)) for row in found}

    @override
    async def state_counts(self) -> Mapping["task_pb2.TaskState.ValueType", StateCount]:
        async with self._database.reading() as connection:
            counts: dict[task_pb2.TaskState.ValueType, StateCount] = dict.fromkeys(_STATES, StateCount(0))
            states = (task_pb2.TASK_STATE_PENDING, task_pb2.TASK_STATE_RUNNING)
            for state, statement in zip(states, sql_statements.OPEN_STATES, strict=True):
                row = (await connection.execute(statement)).one()
                counts[state] = StateCount(row.number, row.oldest_at)
            for row in await connection.execute(sql_statements.ENDED_STATES):
                counts[row.state] = StateCount(row.number)
            return counts

    @override
    async def open_counts(self) -> Mapping[str, int]:
        async with self._database.reading() as connection:
            counts: dict[str, int] = {}
            for statement in sql_statements.OPEN_COUNTS:
                for row in await connection.execute(statement):
                    counts[row.tenant] = counts.get(row.tenant, 0) + row.number
            return counts

    async def database_now(self) -> float | None:
        """Returns the database's UTC seconds since the epoch; None on SQLite, which has one router.

        Leases are compared with the caller's `now`, which routers derive from this. Raises SERVICE_UNAVAILABLE.
        """
        if not self._database.is_shared:
            return None
        found = await self._database.first(sql_statements.DATABASE_TIME)
        assert found is not None, "it selects one row from no table"
        return float(found.now)


class SqlTaskStore(SqlTaskReads, TaskStore):
    """A TaskStore on SQLAlchemy. Life cycle: start, stop; it keeps the shared database open in between.

    Concurrent writes share a commit.
    After a cancellation, or SERVICE_UNAVAILABLE from a broken connection, a writer does not know whether its write is
    on disk. `append` and `end` may then be repeated. A claim that is on disk without its owner knowing
    is renewed with the others; the owner finds it in the result of `renew` and reverts it.
    """

    fence: ClassVar[ColumnElement[bool]] = sql_statements.FENCE
    """The condition of every write under a claim, an attribute so that a negative control can remove it."""

    def __init__(self, database: RouterDatabase, *, max_commit_batch: int) -> None:
        super().__init__(database)
        self._commits = GroupCommit(database, max_batch=max_commit_batch)
        self._fenced = sql_statements.FencedStatements(self.fence)
        self._is_open = False

    async def start(self) -> None:
        """Opens the database. Raises SERVICE_UNAVAILABLE."""
        await self._database.open()
        self._is_open = True
        await self._commits.start()

    async def stop(self) -> None:
        """Closes after all waiting writes are done. Safe to call twice, or when never started."""
        await self._commits.stop()
        if self._is_open:
            # The database counts its users: each one that opened it closes it once.
            self._is_open = False
            await self._database.close()

    @override
    async def submit(self, row: TaskRow) -> pb.SubmitTaskResponse:
        return await self._commits.share(self._submit_all, row)

    async def _submit_all(
        self, connection: AsyncConnection, rows: Sequence[TaskRow]
    ) -> Sequence[pb.SubmitTaskResponse | WeftError]:
        """Inserts the tasks whose idempotency keys are free; returns the result of each, in order."""
        keyed = [row for row in rows if row.idempotency_key]
        unkeyed = [row for row in rows if not row.idempotency_key]
        pending = task_pb2.TASK_STATE_PENDING
        if unkeyed:
            await connection.execute(sql_statements.ADD_TASKS, [sql_rows.values_of(row, pending) for row in unkeyed])
        kept: sql_rows.Kept = {}
        if keyed:
            # In one order everywhere: two routers with the same keys then cannot deadlock.
            keyed.sort(key=sql_rows.key_of)
            adding = sql_statements.add_tasks_if_absent(connection.dialect.name)
            await connection.execute(adding, [sql_rows.values_of(row, pending) for row in keyed])
            kept = await _with_keys(connection, keyed)
        done = [sql_rows.submission_of(row, kept) for row in rows]
        new = [
            sql_rows.spec_values(row)
            for row, each in zip(rows, done, strict=True)
            if isinstance(each, pb.SubmitTaskResponse) and not each.existed
        ]
        if new:
            await connection.execute(sql_statements.ADD_SPECS, new)
        return done

    # -- claims

    @override
    async def claim(self, task_id: str, owner: str, now: float, lease_until: float) -> Claim | None:
        async def take(connection: AsyncConnection) -> Claim | None:
            values = {"the_id": task_id, "the_owner": owner, "the_time": now}
            lease = {"the_lease_end": lease_until, "the_lease_seconds": lease_until - now}
            taken = (await connection.execute(sql_statements.CLAIM_TASK, values | lease)).first()
            if taken is None:
                return None
            claim = Claim(task_id, owner, taken.attempt)
            # A router that slept since it read the clock begins after the attempt that ended meanwhile.
            ended = (await connection.execute(sql_statements.LAST_ATTEMPT_END, {"the_id": task_id})).scalar()
            began = now if ended is None else max(now, ended)
            await connection.execute(sql_statements.BEGIN_ATTEMPT, sql_rows.attempt_values(claim, began))
            return claim

        return await self._commits.run(take)

    @override
    async def renew(self, owner: str, lease_until: float) -> frozenset[Claim]:
        async def extend(connection: AsyncConnection) -> frozenset[Claim]:
            values = {"the_owner": owner, "the_lease_end": lease_until}
            renewed = await connection.execute(sql_statements.RENEW_CLAIMS, values)
            return frozenset(Claim(row.id, owner, row.attempt) for row in renewed)

        return await self._commits.run(extend)

    @override
    async def append(self, claim: Claim, chunks: Sequence[NewChunk]) -> bool:
        return await self._commits.run(lambda connection: self._append(connection, claim, chunks))

    async def _append(self, connection: AsyncConnection, claim: Claim, chunks: Sequence[NewChunk]) -> bool:
        """Appends chunks; stored ones from the first one's index on are replaced.

        So a write with an unknown result can be repeated. Raises INTERNAL if the chunks are not consecutive.
        """
        if not chunks:
            return await self._lock(connection, claim)
        first, last = chunks[0].first_index, chunks[-1].first_index + chunks[-1].event_count - 1
        size = sum(len(chunk.output) for chunk in chunks)
        values = {**sql_rows.claim_parameters(claim), "the_last": last}
        going_on = {**values, "the_index": first - 1, "the_size": size}
        if not (await connection.execute(self._fenced.append, going_on)).rowcount:
            if not await self._lock(connection, claim):
                return False
            longer = {**values, "the_size": size + await _cut(connection, claim, first)}
            if not (await connection.execute(self._fenced.replace, longer)).rowcount:
                return False
        await connection.execute(sql_statements.ADD_PIECES, [sql_rows.piece_values(claim, chunk) for chunk in chunks])
        return True

    async def _lock(self, connection: AsyncConnection, claim: Claim) -> bool:
        """Locks the task of a claim. False: the claim is lost."""
        return (await connection.execute(self._fenced.lock, sql_rows.claim_parameters(claim))).first() is not None

    @override
    async def end(self, claim: Claim, outcome: TaskOutcome, now: float) -> bool:
        async def finish(connection: AsyncConnection) -> bool:
            failure = outcome.failure or task_pb2.TaskError()
            values = {**sql_rows.claim_parameters(claim), **sql_rows.failure_parameters(failure)}
            values["the_state"] = outcome.state
            if not await self._append(connection, claim, outcome.chunks):
                # True if the earlier write succeeded, and its acknowledgement was lost.
                return (await connection.execute(sql_statements.ENDED_TASK, values)).first() is not None
            row = (await connection.execute(self._fenced.end, {**values, "the_time": now})).first()
            if row is None:
                return False
            await add_entries(connection, [ended_attempt(row, now, outcome.receipt, _OUTCOMES[outcome.state])])
            await _end_attempts(connection, [claim], failure, now, receipt=outcome.receipt)
            return True

        return await self._commits.run(finish)

    @override
    async def revert(
        self, claim: Claim, failure: task_pb2.TaskError, *, receipt: bytes, counts: bool, now: float, ready_at: float
    ) -> bool:
        async def give_back(connection: AsyncConnection) -> bool:
            ready = ready_at if ready_at > now else sql_statements.READY_NOW
            again = {"the_failures": int(counts), "the_ready_at": ready, "the_time": now}
            row = (await connection.execute(self._fenced.revert, {**sql_rows.claim_parameters(claim), **again})).first()
            if row is None:
                return False
            await _delete_pieces(connection, [claim])
            await add_entries(connection, [ended_attempt(row, now, receipt, None)])
            await _end_attempts(connection, [claim], failure, now, receipt=receipt)
            return True

        return await self._commits.run(give_back)

    # -- ends without a claim

    @override
    async def cancel(self, tenant: str, task_id: str, now: float) -> task_pb2.Task | None:
        async def stop(connection: AsyncConnection) -> task_pb2.Task | None:
            row = await _locked(connection, tenant, task_id)
            if row is None or row.state >= task_pb2.TASK_STATE_COMPLETED:
                return None if row is None else task_of(row)
            values = {"the_seq": row.seq, "the_time": now}
            after = (await connection.execute(sql_statements.CANCEL_TASK, values)).one()
            if row.state == task_pb2.TASK_STATE_RUNNING:
                await _end_attempts(connection, [Claim(task_id, row.owner, row.attempt)], _BY_OWNER, now)
            was_running = row.state == task_pb2.TASK_STATE_RUNNING
            cancelled = ended_without_receipt(row, now, receipt_pb2.OUTCOME_CANCELLED, was_running=was_running)
            await add_entries(connection, [cancelled])
            task = task_of(after)
            task.owner = row.owner
            return task

        return await self._commits.run(stop)

    @override
    async def delete(self, tenant: str, task_id: str) -> task_pb2.Task | None:
        async def remove(connection: AsyncConnection) -> task_pb2.Task | WeftError | None:
            row = await _locked(connection, tenant, task_id)
            if row is None:
                return None
            if row.state < task_pb2.TASK_STATE_COMPLETED:
                return WeftError(Reason.RESOURCE_IN_USE, f"task {task_id} has not ended; cancel it first")
            await connection.execute(sql_statements.DELETE_TASK, {"the_seq": row.seq})
            return task_of(row)

        done = await self._commits.run(remove)
        if isinstance(done, WeftError):
            raise done
        return done

    @override
    async def revert_expired(self, now: float, limit: int, *, except_of: str = "") -> Sequence[ExpiredLease]:
        async def take_back(connection: AsyncConnection) -> Sequence[ExpiredLease]:
            values = {"the_time": now, "the_limit": limit, "the_owner": except_of}
            rows = (await connection.execute(sql_statements.EXPIRED_LEASES, values)).all()
            if not rows:
                return ()
            again = [row for row in rows if sql_rows.state_of_lost(row) == task_pb2.TASK_STATE_PENDING]
            failed = [row for row in rows if sql_rows.state_of_lost(row) == task_pb2.TASK_STATE_FAILED]
            if again:
                pending = [{"the_seq": row.seq, "the_time": now} for row in again]
                await connection.execute(sql_statements.REVERT_LOST_TASK, pending)
            if failed:
                ended = [sql_rows.end_parameters(row, sql_rows.given_up(row), now) for row in failed]
                await connection.execute(sql_statements.FAIL_LOST_TASK, ended)
            claims = [Claim(row.id, row.owner, row.attempt) for row in rows]
            await _delete_pieces(connection, claims)
            lost = [ended_without_receipt(row, now, None) for row in again]
            lost += [ended_without_receipt(row, now, receipt_pb2.OUTCOME_FAILED) for row in failed]
            await add_entries(connection, lost)
            await _end_attempts(connection, claims, sql_rows.LOST, now)
            return [
                ExpiredLease(claim=claim, lane=lane_of(row), state=sql_rows.state_of_lost(row))
                for claim, row in zip(claims, rows, strict=True)
            ]

        return await self._commits.run(take_back)

    @override
    async def fail_expired(self, now: float, limit: int) -> Sequence[str]:
        async def fail(connection: AsyncConnection) -> Sequence[str]:
            values = {"the_time": now, "the_limit": limit}
            rows = (await connection.execute(sql_statements.EXPIRED_TASKS, values)).all()
            if rows:
                ended = [sql_rows.end_parameters(row, sql_rows.why_never(row), now) for row in rows]
                await connection.execute(sql_statements.FAIL_TASK, ended)
                failed = receipt_pb2.OUTCOME_FAILED
                never = [ended_without_receipt(row, now, failed, was_running=False) for row in rows]
                await add_entries(connection, never)
            return [row.id for row in rows]

        return await self._commits.run(fail)

    @override
    async def purge_ended(self, before: float, limit: int) -> int:
        async def purge(connection: AsyncConnection) -> int:
            values = {"the_time": before, "the_limit": limit}
            return (await connection.execute(sql_statements.PURGE_TASKS, values)).rowcount

        return await self._commits.run(purge)

    @override
    async def release_oldest(self, wanted: Release, limit: int) -> KeptTasks:
        async def release(connection: AsyncConnection) -> KeptTasks:
            values: dict[str, object] = {"the_limit": limit}
            oldest = sql_statements.OLDEST_KEPT
            if wanted.tenant:
                oldest, values = sql_statements.OLDEST_KEPT_OF_TENANT, values | {"the_tenant": wanted.tenant}
            chosen: list[int] = []
            size = 0
            for row in await connection.execute(oldest, values):
                if len(chosen) >= wanted.count and size >= wanted.size:
                    break
                chosen.append(row.seq)
                size += row.size
            if chosen:
                await connection.execute(sql_statements.DELETE_TASKS, {"the_seqs": chosen})
            return KeptTasks(count=len(chosen), size=size)

        return await self._commits.run(release)

    @override
    async def bring_back(self, now: float, longest_pause_seconds: float, limit: int) -> int:
        moments = sql_statements.moments_of(now, longest_pause_seconds)
        # Nearly always there is nothing to do; a read finds that out without delaying writers.
        async with self._database.reading() as connection:
            if not await is_any_ahead(connection, moments):
                return 0
        return await self._commits.run(lambda connection: bring_back(connection, moments, limit))


def _as_many_as_fit(rows: Sequence[Any], max_bytes: int) -> Sequence[Any]:
    """Returns the first rows that fit, at least one if there is one."""
    total = 0
    for count, row in enumerate(rows):
        total += row.size
        if count and total > max_bytes:
            return rows[:count]
    return rows


async def _with_keys(connection: AsyncConnection, rows: Sequence[TaskRow]) -> sql_rows.Kept:
    """Returns the stored tasks that have the keys of these rows, which are in the order of their keys."""
    kept: dict[tuple[str, str], Row[tuple[Any, ...]]] = {}
    for tenant, of_tenant in groupby(rows, key=lambda row: row.lane.tenant):
        values = {"the_tenant": tenant, "the_keys": sorted({row.idempotency_key for row in of_tenant})}
        found = await connection.execute(sql_statements.TASKS_WITH_KEYS, values)
        kept |= {(tenant, row.idempotency_key): row for row in found}
    return kept


async def _locked(connection: AsyncConnection, tenant: str, task_id: str) -> Row[tuple[Any, ...]] | None:
    return (await connection.execute(sql_statements.LOCK_TASK, {"the_id": task_id, "the_tenant": tenant})).first()


async def _cut(connection: AsyncConnection, claim: Claim, first: int) -> int:
    """Deletes the chunks from an index on; returns the bytes of the rest."""
    this = sql_rows.attempt_parameters(claim)
    await connection.execute(sql_statements.DELETE_PIECES_FROM, {**this, "the_index": first})
    rest = (await connection.execute(sql_statements.ANSWER_SIZE, this)).one()
    if (rest.next_index or 1) != first:
        raise WeftError(Reason.INTERNAL, "the chunks of an answer are not consecutive")
    return int(rest.size or 0)


async def _delete_pieces(connection: AsyncConnection, claims: Sequence[Claim]) -> None:
    await connection.execute(sql_statements.DELETE_PIECES, [sql_rows.attempt_parameters(each) for each in claims])


async def _end_attempts(
    connection: AsyncConnection,
    claims: Sequence[Claim],
    failure: task_pb2.TaskError,
    now: float,
    *,
    receipt: bytes = b"",
) -> None:
    over = {"the_time": now, "the_receipt": receipt, **sql_rows.failure_parameters(failure)}
    ended = [{**sql_rows.attempt_parameters(each), **over} for each in claims]
    await connection.execute(sql_statements.END_ATTEMPT, ended)
