"""The task store in a router's database, SQLite or PostgreSQL. Tests: `tests/contract/test_task_store.py`.

Times are UTC seconds since the epoch, passed as `now`. Writes are durable when they return; every method raises
SERVICE_UNAVAILABLE if the database fails, and then nothing was acknowledged. A claim is a fencing token: a write under
a lost claim is discarded and returns False. Each frequent statement uses an index:
`tests/contract/test_task_store_plans.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

from router_svc.durable.clock_clamp import BoundedMoment, bring_back, is_any_ahead
from router_svc.durable.tasks import sql_rows
from router_svc.durable.tasks.sql_rows import NO_SEQ, SPECS, STAGED, as_many_as_fit, lane_of, task_of
from router_svc.durable.tasks.task_ends import ReportEnds, ignore_ends, settle, tasks_in
from router_svc.durable.tasks.task_records import (
    EndedTask,
    ExpiredLease,
    Lane,
    NewChunk,
    NewTask,
    PendingTask,
    StateCount,
    TaskLease,
    TaskOutcome,
)
from router_svc.durable.webhooks.outbox import Outbox
from router_svc.policy.task_release import KeptTasks, Release
from router_svc.policy.task_retry import ASKS_FOR_PAUSE, MAX_ASKED_PAUSE_SECONDS
from router_svc.store.database import RouterDatabase, time_of
from weft.api.router.v1 import task_pb2
from weft.api.router.v1 import task_service_pb2 as pb
from weft.durable.tasks import DEFAULT_LISTED, MAX_LISTED, task_error
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.timestamps import stamp_of
from weft.sql.connections import Row, Tx
from weft.sql.statements import insert

RECORD_LAG_SECONDS = 60.0
"""Records of requests are written later than tasks end, but not by more than this."""
MAX_CHUNKS_READ = 1_024
"""Maximum chunks per call."""
_BY_OWNER = task_error(Reason.CANCELLED, "it was cancelled")
_STATES = tuple(number for number in task_pb2.TaskState.values() if number)

# States are literals, as a partial index serves only statements that repeat its condition.
_MAY_START = "state = 1 AND ready_at <= :now AND expires_at > :now"
_UNCLAIMED = "owner = '', lease_until = NULL, lease_seconds = NULL"
_AGAIN = f"""state = 1, expires_at = COALESCE(window_ends_at, pending_limit_seconds + :now), {_UNCLAIMED},
    last_index = 0, result_size = 0, error_reason = :reason, error_message = :message"""
_FAILED = f"state = 4, ended_at = :now, error_reason = :reason, error_message = :message, {_UNCLAIMED}"
_TASK = f"SELECT * FROM tasks WHERE id = :id AND tenant = :tenant AND state <> {STAGED}"
_WITH_KEY = "SELECT * FROM tasks WHERE tenant = :tenant AND idempotency_key = :key"
_OF_ATTEMPT = "task_id = :id AND attempt = :attempt"
# The batch's results may still have to be written from its items.
_NOT_AWAITED = "NOT EXISTS (SELECT 1 FROM batches WHERE batches.id = tasks.batch_id AND batches.state IN (2, 3))"


def _first_after(model: str, tenant: str, band: str) -> str:
    """Returns the first task of the next lane.

    One subquery per column, as SQLite evaluates a row comparison only after scanning the whole lane.
    """
    first = f"SELECT seq FROM tasks WHERE {_MAY_START} AND model"
    return f"""COALESCE(
        ({first} = {model} AND tenant = {tenant} AND band > {band} ORDER BY band, seq LIMIT 1),
        ({first} = {model} AND tenant > {tenant} ORDER BY tenant, band, seq LIMIT 1),
        ({first} > {model} ORDER BY model, tenant, band, seq LIMIT 1))"""


def _lanes_from(begin: str) -> str:
    """Returns an index skip scan from each lane's first task to the next lane."""
    return f"""
        WITH RECURSIVE lane(seq, place) AS (
            SELECT {begin}, 1 UNION ALL
            SELECT {_first_after("this.model", "this.tenant", "this.band")}, lane.place + 1
            FROM lane JOIN tasks AS this ON this.seq = lane.seq WHERE lane.place < :limit
        ) SELECT lane.place, tasks.model, tasks.tenant, tasks.band FROM lane JOIN tasks ON tasks.seq = lane.seq"""


_LANES = _lanes_from(f"(SELECT seq FROM tasks WHERE {_MAY_START} ORDER BY model, tenant, band, seq LIMIT 1)")
_LANES_AFTER = _lanes_from(_first_after(":model", ":tenant", ":band"))


class SqlTaskStore:
    """Tasks, claims and answers. Life cycle: start, stop; meanwhile it keeps the shared database open.

    After a cancellation, or SERVICE_UNAVAILABLE from a broken connection, a writer does not know whether its write is
    on disk. It may repeat `append` and `end`. A claim that is on disk unknown to its owner is renewed with the others;
    the owner finds it in the result of `renew` and reverts it.
    """

    fence: ClassVar[str] = "id = :id AND owner = :owner AND attempt = :attempt AND state = 2"
    """The condition of every write under a claim: it selects the task while it has this claim. An attribute, so that a
    negative control can remove it."""

    def __init__(self, database: RouterDatabase) -> None:
        self._database = database
        self._is_open = False
        self.report_ends: ReportEnds = ignore_ends
        """Called with the tasks that ended here, after each commit."""
        self.outbox = Outbox()
        """Gets the events about ended tasks."""

    async def start(self) -> None:
        """Opens the database. Raises SERVICE_UNAVAILABLE."""
        await self._database.open()
        self._is_open = True

    async def stop(self) -> None:
        """Closes after all waiting writes. Safe to call twice or without a start."""
        if self._is_open:
            # The database counts its users, and each may close it only once.
            self._is_open = False
            await self._database.close()

    async def submitted(self, new: NewTask) -> pb.SubmitTaskResponse | None:
        """Returns the stored task with this idempotency key; None: there is none. Raises IDEMPOTENCY_CONFLICT."""
        if not new.idempotency_key:
            return None
        found = await self._database.row(_WITH_KEY, tenant=new.task.tenant, key=new.idempotency_key)
        return None if found is None else sql_rows.submission_of(new, found)

    async def get(self, tenant: str, task_id: str) -> task_pb2.Task | None:
        """Returns a task; None, also below: the tenant has no task with this id."""
        row = await self._database.row(_TASK, id=task_id, tenant=tenant)
        return None if row is None else task_of(row)

    async def details(self, tenant: str, task_id: str) -> pb.GetTaskResponse | None:
        """Returns a task with its spec and attempts."""

        def read(tx: Tx) -> pb.GetTaskResponse | None:
            row = tx.row(_TASK, id=task_id, tenant=tenant)
            if row is None:
                return None
            attempts = tx.rows("SELECT * FROM task_attempts WHERE task_id = :id ORDER BY attempt", id=task_id)
            details = pb.GetTaskResponse(task=task_of(row), attempts=map(sql_rows.attempt_of, attempts))
            for kept in tx.rows("SELECT spec FROM task_specs WHERE task_id = :id", id=task_id):
                details.spec.ParseFromString(kept.spec)
            if (webhook := self.outbox.find(tx, details.task)) is not None:
                details.webhook.CopyFrom(webhook)
            return details

        return await self._database.read(read)

    async def list_page(self, tenant: str, request: pb.ListTasksRequest) -> pb.ListTasksResponse:
        """Returns a page of tasks, newest first. Raises INVALID_ARGUMENT for a page token of another query."""
        size = max(1, min(request.page_size or DEFAULT_LISTED, MAX_LISTED))
        mark = sql_rows.mark_of(tenant, request)
        before = sql_rows.seq_of(request.page_token, mark) if request.page_token else NO_SEQ
        values: dict[str, Any] = {"tenant": tenant, "before": before, "limit": size + 1}
        wanted = ""
        for column in ("model", "caller", "request_id", "origin_kind", "batch"):
            if value := getattr(request, column):
                wanted += f" AND {'batch_id' if column == 'batch' else column} = :{column}"
                values[column] = value
        if request.states:
            wanted += " AND state IN :states"
            values["states"] = sorted(set(request.states))
        # A row comparison, as with an equality PostgreSQL may scan the tasks of all tenants.
        page = f"""SELECT * FROM tasks WHERE tenant >= :tenant AND (tenant, seq) < (:tenant, :before)
            AND state <> {STAGED}{wanted} ORDER BY tenant DESC, seq DESC LIMIT :limit"""
        rows = await self._database.rows(page, **values)
        token = sql_rows.token_of(rows[size - 1].seq, mark) if len(rows) > size else ""
        return pb.ListTasksResponse(
            tasks=map(task_of, rows[:size]), next_page_token=token, notice=self._database.notice
        )

    async def chunks(
        self, task_id: str, attempt: int, after_index: int, max_bytes: int
    ) -> Sequence[task_pb2.TaskPiece]:
        """Returns stored chunks of an attempt after an event in order, as many as fit, at least one."""

        def read(tx: Tx) -> Sequence[task_pb2.TaskPiece]:
            # The next event may be inside the piece that begins last before it; the rest of that piece is returned.
            this = {"id": task_id, "attempt": attempt}
            found = tx.rows(
                f"""SELECT first_index, length(output) AS size FROM task_pieces WHERE {_OF_ATTEMPT} AND first_index >=
                COALESCE((SELECT max(first_index) FROM task_pieces WHERE {_OF_ATTEMPT} AND first_index <= :next), 0)
                ORDER BY first_index LIMIT :limit""",
                **this,
                next=after_index + 1,
                limit=MAX_CHUNKS_READ,
            )
            chosen = as_many_as_fit(found, max_bytes)
            if not chosen:
                return ()
            rows = tx.rows(
                f"""SELECT first_index, event_count, output FROM task_pieces WHERE {_OF_ATTEMPT}
                AND first_index BETWEEN :first AND :last ORDER BY first_index""",
                **this,
                first=chosen[0].first_index,
                last=chosen[-1].first_index,
            )
            pieces = [sql_rows.piece_of(row, attempt, after_index) for row in rows]
            return [piece for piece in pieces if piece is not None]

        return await self._database.read(read)

    async def lanes(self, now: float, after: Lane | None, limit: int) -> Sequence[Lane]:
        """Returns lanes with a task that may start now, in order, after a given lane (None: from the first).

        The cost does not depend on the number of tasks in each lane.
        """
        values: dict[str, Any] = {"now": now, "limit": limit}
        if after is None:
            found = await self._database.rows(_LANES, **values)
        else:
            found = await self._database.rows(_LANES_AFTER, **values, **sql_rows.lane_parameters(after))
        # In the database's order, not Python's, as the next page begins after the last of these.
        return [lane_of(row) for row in sorted(found, key=lambda row: row.place)]

    async def pending(self, lane: Lane, now: float, limit: int, max_bytes: int) -> Sequence[PendingTask]:
        """Returns the first tasks of a lane that may start now, as many as fit, at least one if there are any."""

        def read(tx: Tx) -> Sequence[PendingTask]:
            # BETWEEN instead of an equality, so that only one index has the order. With an equality PostgreSQL may scan
            # all tasks by `seq` until it has found enough of the lane.
            found = tx.rows(
                f"""SELECT id, caller, attempt, failures, max_attempts, batch_id, created_at, length(spec) AS size
                FROM tasks JOIN task_specs ON task_id = id WHERE {_MAY_START} AND model = :model AND tenant = :tenant
                AND band BETWEEN :band AND :band ORDER BY band, seq LIMIT :limit""",
                now=now,
                limit=limit,
                **sql_rows.lane_parameters(lane),
            )
            chosen = as_many_as_fit(found, max_bytes)
            if not chosen:
                return ()
            specs = {row.task_id: row.spec for row in tx.rows(SPECS, ids=[row.id for row in chosen])}
            return [
                PendingTask(
                    id=row.id,
                    lane=lane,
                    spec=specs[row.id],
                    caller=row.caller,
                    attempt=row.attempt,
                    failures=row.failures,
                    max_attempts=row.max_attempts,
                    batch=row.batch_id,
                    created_at=row.created_at,
                )
                for row in chosen
            ]

        return await self._database.read(read)

    async def next_ready_at(self, now: float) -> float | None:
        """Returns when the next retry pause ends; None: no task is paused."""
        found = await self._database.row(
            "SELECT ready_at FROM tasks WHERE state = 1 AND ready_at > :now ORDER BY ready_at LIMIT 1", now=now
        )
        return None if found is None else float(found.ready_at)

    async def open_of_request(self, request_id: str, limit: int) -> Sequence[task_pb2.Task]:
        """Returns unfinished tasks with this request id or id, of any tenant, oldest first."""
        found = await self._database.rows(
            """SELECT * FROM tasks WHERE request_id = :request_id AND state IN (1, 2)
            UNION ALL SELECT * FROM tasks WHERE id = :request_id AND state IN (1, 2) LIMIT :limit""",
            request_id=request_id,
            limit=limit,
        )
        return [task_of(row) for row in sorted(found, key=lambda row: row.seq)]

    async def tried(self, limit: int) -> Sequence[EndedTask]:
        """Returns unfinished tasks with attempts, and the receipts so far."""
        some = "SELECT * FROM tasks WHERE state = 2 OR (state = 1 AND attempt > 0) LIMIT :limit"
        return await self._database.read(lambda tx: tasks_in(tx, tx.rows(some, limit=limit)))

    async def unrecorded_ends(self, since: float, limit: int) -> Sequence[EndedTask]:
        """Returns tasks that ended after the last write of request records, which lacks them, and after `since`."""
        some = f"""SELECT * FROM tasks WHERE state > 2 AND ended_at > :since AND ended_at >
            COALESCE((SELECT max(ended_at) FROM request_records), 0) - {RECORD_LAG_SECONDS}
            AND NOT EXISTS (SELECT 1 FROM request_records WHERE request_records.request_id = tasks.id)
            ORDER BY ended_at LIMIT :limit"""
        return await self._database.read(lambda tx: tasks_in(tx, tx.rows(some, since=since, limit=limit)))

    async def kept_counts(self) -> Mapping[str, KeptTasks]:
        """Returns number and size of finished tasks by tenant."""
        found = await self._database.rows(
            """SELECT tenant, count(*) AS number, sum(result_size + request_size) AS size FROM tasks
            WHERE state > 2 GROUP BY tenant"""
        )
        return {row.tenant: KeptTasks(count=row.number, size=int(row.size)) for row in found}

    async def state_counts(self) -> Mapping["task_pb2.TaskState.ValueType", StateCount]:
        """Returns the number of tasks per state except STAGED."""

        def read(tx: Tx) -> Mapping["task_pb2.TaskState.ValueType", StateCount]:
            counts: dict[task_pb2.TaskState.ValueType, StateCount] = dict.fromkeys(_STATES, StateCount(0))
            for state in (task_pb2.TASK_STATE_PENDING, task_pb2.TASK_STATE_RUNNING):
                oldest = f"SELECT count(*) AS number, min(created_at) AS oldest_at FROM tasks WHERE state = {state:d}"
                counts[state] = StateCount(*tx.rows(oldest)[0])
            for row in tx.rows("SELECT state, count(*) AS number FROM tasks WHERE state > 2 GROUP BY state"):
                counts[row.state] = StateCount(row.number)
            return counts

        return await self._database.read(read)

    async def open_counts(self) -> Mapping[str, int]:
        """Returns the number of unfinished tasks by tenant."""

        def read(tx: Tx) -> Mapping[str, int]:
            counts: dict[str, int] = {}
            for state in (task_pb2.TASK_STATE_PENDING, task_pb2.TASK_STATE_RUNNING):
                of_state = f"SELECT tenant, count(*) AS number FROM tasks WHERE state = {state:d} GROUP BY tenant"
                for row in tx.rows(of_state):
                    counts[row.tenant] = counts.get(row.tenant, 0) + row.number
            return counts

        return await self._database.read(read)

    async def database_now(self) -> float | None:
        """Returns the database's UTC seconds since the epoch; None for SQLite, which has one router.

        Leases are compared with the caller's `now`, which routers derive from this. Raises SERVICE_UNAVAILABLE.
        """
        return await self._database.read(time_of) if self._database.is_shared else None

    async def submit(self, new: NewTask) -> pb.SubmitTaskResponse:
        """Stores a task. Raises IDEMPOTENCY_CONFLICT. Concurrent submissions share one commit."""

        def submit(tx: Tx) -> pb.SubmitTaskResponse:
            values = sql_rows.values_of(new, task_pb2.TASK_STATE_PENDING)
            add = f"{insert('tasks', *values)} ON CONFLICT (tenant, idempotency_key) DO NOTHING"
            if not tx.execute(add, **values):
                (found,) = tx.rows(_WITH_KEY, tenant=new.task.tenant, key=new.idempotency_key)
                return sql_rows.submission_of(new, found)
            tx.insert("task_specs", {"task_id": new.task.id, "spec": new.spec})
            answer = pb.SubmitTaskResponse(task=new.task)
            answer.task.create_time.CopyFrom(stamp_of(new.created_at))
            answer.task.expire_time.CopyFrom(stamp_of(new.expires_at))
            return answer

        return await self._database.run(submit)

    # -- claims

    async def claim(self, task_id: str, owner: str, now: float, lease_until: float) -> TaskLease | None:
        """Claims a pending task; None: another router has it, or it is not pending. Never waits for a row lock."""

        def take(tx: Tx) -> TaskLease | None:
            taken = tx.row(
                f"""UPDATE tasks SET state = 2, owner = :owner, attempt = attempt + 1, lease_until = :lease_until,
                lease_seconds = :lease_seconds, started_at = :now, last_index = 0, result_size = 0
                WHERE id = :id AND {_MAY_START} RETURNING attempt""",
                id=task_id,
                owner=owner,
                now=now,
                lease_until=lease_until,
                lease_seconds=lease_until - now,
            )
            if taken is None:
                return None
            # A router that slept after reading the clock must begin after the attempt that ended meanwhile.
            ended = tx.value("SELECT max(ended_at) FROM task_attempts WHERE task_id = :id", id=task_id)
            began = now if ended is None else max(now, ended)
            attempt = {"task_id": task_id, "attempt": taken.attempt, "owner": owner, "claimed_at": began}
            tx.insert("task_attempts", {**attempt, "reason": 0, "message": "", "receipt": b""})
            return TaskLease(task_id, owner, taken.attempt)

        return await self._database.run(take, vital=True)

    async def renew(self, owner: str, lease_until: float) -> frozenset[TaskLease]:
        """Renews the leases of all claims of an owner; returns the claims that it still has."""
        extend = "UPDATE tasks SET lease_until = :end WHERE state = 2 AND owner = :owner RETURNING id, attempt"
        renewed = await self._database.run(lambda tx: tx.rows(extend, owner=owner, end=lease_until), vital=True)
        return frozenset(TaskLease(row.id, owner, row.attempt) for row in renewed)

    async def append(self, claim: TaskLease, chunks: Sequence[NewChunk]) -> bool:
        """Appends chunks to an answer. False: the claim is lost and nothing was stored."""
        return await self._database.run(lambda tx: self._append(tx, claim, chunks), vital=True)

    def _append(self, tx: Tx, claim: TaskLease, chunks: Sequence[NewChunk]) -> bool:
        """Appends chunks and replaces stored ones from the first one's index on, so that a write can be repeated.

        Raises INTERNAL if the chunks are not consecutive.
        """
        values: dict[str, Any] = sql_rows.claim_parameters(claim)
        known = tx.row(f"SELECT last_index, result_size FROM tasks WHERE {self.fence}", **values)
        if known is None:
            return False
        if not chunks:
            return True
        first, last = chunks[0].first_index, chunks[-1].first_index + chunks[-1].event_count - 1
        kept = known.result_size if known.last_index == first - 1 else _cut(tx, claim, first)
        size = kept + sum(len(chunk.output) for chunk in chunks)
        longer = f"UPDATE tasks SET last_index = :last, result_size = :size WHERE {self.fence}"
        tx.execute(longer, last=last, size=size, **values)
        of_attempt = {"task_id": claim.task_id, "attempt": claim.attempt}
        tx.insert("task_pieces", *({**of_attempt, **asdict(chunk)} for chunk in chunks))
        return True

    async def end(self, claim: TaskLease, outcome: TaskOutcome, now: float) -> bool:
        """Ends the task and its attempt. False: the claim is lost and nothing was stored."""

        def finish(tx: Tx) -> list[EndedTask]:
            failure = outcome.failure or task_pb2.TaskError()
            values: dict[str, Any] = sql_rows.claim_parameters(claim) | sql_rows.failure_parameters(failure)
            if not self._append(tx, claim, outcome.chunks):
                # Found if the earlier write succeeded but its acknowledgement was lost. The receipt tells it from a
                # cancellation by another call, which stores none.
                ended = """SELECT tasks.* FROM tasks JOIN task_attempts
                    ON task_attempts.task_id = tasks.id AND task_attempts.attempt = tasks.attempt
                    WHERE tasks.id = :id AND tasks.attempt = :attempt AND tasks.state = :state
                    AND error_reason = :reason AND error_message = :message AND task_attempts.owner = :owner
                    AND task_attempts.receipt = :receipt"""
                return tasks_in(tx, tx.rows(ended, **values, state=outcome.state, receipt=outcome.receipt))
            row = tx.row(
                f"""UPDATE tasks SET state = :state, ended_at = :now, error_reason = :reason, error_message = :message,
                {_UNCLAIMED} WHERE {self.fence} RETURNING *""",
                **values,
                state=outcome.state,
                now=now,
            )
            assert row is not None, "the claim was found in this transaction"
            was_cancelled = outcome.state == task_pb2.TASK_STATE_CANCELLED and outcome.failure is None
            _end_attempts(tx, [claim], _BY_OWNER if was_cancelled else failure, now, receipt=outcome.receipt)
            return self._settle(tx, [row], now)

        ended = await self._database.run(finish, vital=True)
        self.report_ends(ended)
        return bool(ended)

    async def revert(
        self,
        claim: TaskLease,
        failure: task_pb2.TaskError,
        *,
        receipt: bytes,
        counts: bool,
        now: float,
        ready_at: float,
    ) -> bool:
        """Discards a failed attempt and its chunks; the task is pending again and may start at `ready_at`.

        `counts`: whether the attempt counts toward `max_attempts`. False: the claim is lost and nothing was changed.
        """

        def give_back(tx: Tx) -> bool:
            is_done = tx.execute(
                f"""UPDATE tasks SET failures = failures + :failures, ready_at = :ready_at, {_AGAIN}
                WHERE {self.fence}""",
                **sql_rows.claim_parameters(claim),
                **sql_rows.failure_parameters(failure),
                failures=int(counts),
                ready_at=ready_at if ready_at > now else sql_rows.READY_NOW,
                now=now,
            )
            if not is_done:
                return False
            _delete_pieces(tx, [claim])
            _end_attempts(tx, [claim], failure, now, receipt=receipt)
            return True

        return await self._database.run(give_back, vital=True)

    # -- ends without a claim

    async def cancel(self, tenant: str, task_id: str, now: float) -> tuple[task_pb2.Task | None, bool]:
        """Cancels a task unless it is terminal; returns it, and whether this call ended it.

        The router that ran a task ended by this call is still in `owner`.
        """

        def stop(tx: Tx) -> tuple[task_pb2.Task | None, list[EndedTask]]:
            row = tx.row(_TASK, id=task_id, tenant=tenant)
            if row is None or row.state >= task_pb2.TASK_STATE_COMPLETED:
                return None if row is None else task_of(row), []
            cancel = f"""UPDATE tasks SET state = :state, ended_at = :now, error_reason = 0, error_message = '',
                {_UNCLAIMED} WHERE seq = :seq RETURNING *"""
            after = tx.rows(cancel, seq=row.seq, now=now, state=task_pb2.TASK_STATE_CANCELLED)
            if row.state == task_pb2.TASK_STATE_RUNNING:
                _end_attempts(tx, [TaskLease(task_id, row.owner, row.attempt)], _BY_OWNER, now)
            task = task_of(after[0])
            task.owner = row.owner
            return task, self._settle(tx, after, now)

        task, ended = await self._database.run(stop)
        self.report_ends(ended)
        return task, bool(ended)

    async def delete(self, tenant: str, task_id: str) -> task_pb2.Task | None:
        """Deletes a terminal task and returns its last state. Raises RESOURCE_IN_USE if it is not terminal."""

        def remove(tx: Tx) -> task_pb2.Task | None:
            row = tx.row(_TASK, id=task_id, tenant=tenant)
            if row is None:
                return None
            if row.state < task_pb2.TASK_STATE_COMPLETED:
                raise WeftError(Reason.RESOURCE_IN_USE, f"task {task_id} has not ended; cancel it first")
            tx.execute("DELETE FROM tasks WHERE seq = :seq", seq=row.seq)
            return task_of(row)

        return await self._database.run(remove)

    async def revert_expired(self, now: float, limit: int, *, except_of: str = "") -> Sequence[ExpiredLease]:
        """Takes back claims with expired leases: each task is pending again, or fails without an attempt left.

        `except_of`: an owner whose claims stay.
        """

        def take_back(tx: Tx) -> tuple[Sequence[ExpiredLease], list[EndedTask]]:
            rows = tx.rows(
                """SELECT * FROM tasks WHERE state = 2 AND lease_until <= :now AND owner <> :owner
                ORDER BY lease_until LIMIT :limit""",
                now=now,
                limit=limit,
                owner=except_of,
            )
            if not rows:
                return (), []
            again = [row for row in rows if row.failures + 1 < row.max_attempts]
            failed = [row for row in rows if row.failures + 1 >= row.max_attempts]
            lost = [
                ExpiredLease(claim=TaskLease(row.id, row.owner, row.attempt), lane=lane_of(row), state=state)
                for some, state in ((again, task_pb2.TASK_STATE_PENDING), (failed, task_pb2.TASK_STATE_FAILED))
                for row in some
            ]
            tx.many(
                f"UPDATE tasks SET failures = failures + 1, ready_at = {sql_rows.READY_NOW}, {_AGAIN} WHERE seq = :seq",
                [sql_rows.end_parameters(row, sql_rows.LOST, now) for row in again],
            )
            tx.many(
                f"""UPDATE tasks SET failures = failures + 1, last_index = 0, result_size = 0, {_FAILED}
                WHERE seq = :seq""",
                [sql_rows.end_parameters(row, sql_rows.given_up(row), now) for row in failed],
            )
            claims = [each.claim for each in lost]
            _delete_pieces(tx, claims)
            _end_attempts(tx, claims, sql_rows.LOST, now)
            return lost, self._settle(tx, _rows_of(tx, failed), now)

        lost, ended = await self._database.run(take_back, vital=True)
        self.report_ends(ended)
        return lost

    async def fail_expired(self, now: float, limit: int, refusals: Mapping[Lane, str]) -> Sequence[str]:
        """Fails expired pending tasks: QUEUE_TIMEOUT, or DEADLINE_EXCEEDED after a batch window. Returns their ids.

        `refusals`: why the last offers were refused.
        """

        def fail(tx: Tx) -> list[EndedTask]:
            rows = tx.rows(
                """SELECT seq, attempt, window_ends_at, pending_limit_seconds, tenant, model, band, error_reason,
                error_message FROM tasks WHERE state = 1 AND expires_at <= :now ORDER BY expires_at LIMIT :limit""",
                now=now,
                limit=limit,
            )
            whys = (sql_rows.why_never(row, refusals.get(lane_of(row), "")) for row in rows)
            ended = [sql_rows.end_parameters(row, why, now) for row, why in zip(rows, whys, strict=True)]
            tx.many(f"UPDATE tasks SET {_FAILED} WHERE seq = :seq", ended)
            return self._settle(tx, _rows_of(tx, rows), now)

        failed = await self._database.run(fail)
        self.report_ends(failed)
        return [each.task.id for each in failed]

    async def purge_ended(self, before: float, limit: int) -> Sequence[str]:
        """Deletes tasks that ended before a time, except batch items without written results; returns their ids."""
        purge = f"""DELETE FROM tasks WHERE seq IN (SELECT seq FROM tasks WHERE state > 2 AND ended_at < :before
            AND {_NOT_AWAITED} ORDER BY ended_at LIMIT :limit) RETURNING id"""
        rows = await self._database.run(lambda tx: tx.rows(purge, before=before, limit=limit))
        return [row.id for row in rows]

    async def release_oldest(self, wanted: Release, limit: int) -> Mapping[str, int]:
        """Deletes the oldest finished tasks until `wanted` is reached, at most `limit`; returns their sizes by id.

        Batch items are deleted only after their results are written.
        """
        # As in `pending`: with an equality PostgreSQL may scan the finished tasks of all tenants.
        of_tenant, order = ("AND tenant BETWEEN :tenant AND :tenant", "tenant, ") if wanted.tenant else ("", "")
        oldest = f"""SELECT seq, id, result_size + request_size AS size FROM tasks WHERE state > 2 {of_tenant}
            AND {_NOT_AWAITED} ORDER BY {order}ended_at LIMIT :limit"""

        def release(tx: Tx) -> Mapping[str, int]:
            chosen: list[Mapping[str, int]] = []
            sizes: dict[str, int] = {}
            size = 0
            for row in tx.rows(oldest, limit=limit, **({"tenant": wanted.tenant} if wanted.tenant else {})):
                if len(chosen) >= wanted.count and size >= wanted.size:
                    break
                chosen.append({"seq": row.seq})
                sizes[row.id] = row.size
                size += row.size
            tx.many("DELETE FROM tasks WHERE seq = :seq", chosen)
            return sizes

        return await self._database.run(release)

    async def bring_back(self, now: float, longest_pause_seconds: float, limit: int) -> int:
        """Corrects times that are impossibly far in the future after a clock was set back; returns how many.

        A lease ends within its length, a pause within the longest one, a wait within its limit, and no end time is in
        the future. Corrects at most `limit` of each kind.
        """
        moments = _moments_of(longest_pause_seconds)
        # There is nearly always nothing to do, which a read finds out without a commit.
        if not await self._database.read(lambda tx: is_any_ahead(tx, moments, now)):
            return 0
        return await self._database.run(lambda tx: bring_back(tx, moments, now, limit))

    def _settle(self, tx: Tx, rows: Sequence[Row], now: float) -> list[EndedTask]:
        ended = settle(tx, rows, now)
        self.outbox.add_tasks(tx, [each.task for each in ended], now)
        return ended


def _moments_of(longest_pause_seconds: float) -> Sequence[BoundedMoment]:
    """Returns the latest possible times of tasks; `longest_pause_seconds`: of retries."""
    moment = BoundedMoment
    has_window = "state IN (1, 2) AND window_ends_at IS NOT NULL"
    pause, asked = f":now + {longest_pause_seconds:f}", f":now + {MAX_ASKED_PAUSE_SECONDS:f}"
    asking = ", ".join(str(reason.value) for reason in ASKS_FOR_PAUSE)
    return (
        moment("tasks", "seq", "lease_until", latest=":now + lease_seconds", where="state = 2"),
        moment("tasks", "seq", "ready_at", latest=pause, where=f"state = 1 AND error_reason NOT IN ({asking})"),
        moment("tasks", "seq", "ready_at", latest=asked, where="state = 1"),
        moment(
            "tasks",
            "seq",
            "expires_at",
            latest=":now + pending_limit_seconds",
            where="state = 1 AND window_ends_at IS NULL",
        ),
        # A window begins with the creation of its batch.
        moment("tasks", "seq", "created_at", where=has_window, along=("window_ends_at", "expires_at")),
        moment("tasks", "seq", "ended_at", where="state > 2"),
    )


def _rows_of(tx: Tx, rows: Sequence[Any]) -> Sequence[Row]:
    """Returns the present rows of tasks."""
    return tx.rows("SELECT * FROM tasks WHERE seq IN :seqs", seqs=[row.seq for row in rows]) if rows else ()


def _cut(tx: Tx, claim: TaskLease, first: int) -> int:
    """Deletes chunks from an index on; returns the size of the rest."""
    this: dict[str, Any] = {"id": claim.task_id, "attempt": claim.attempt}
    tx.execute(f"DELETE FROM task_pieces WHERE {_OF_ATTEMPT} AND first_index >= :first", **this, first=first)
    rest = tx.row(
        f"""SELECT max(first_index + event_count) AS next_index, sum(length(output)) AS size FROM task_pieces
        WHERE {_OF_ATTEMPT}""",
        **this,
    )
    assert rest is not None, "an aggregate without groups is one row"
    if (rest.next_index or 1) != first:
        raise WeftError(Reason.INTERNAL, "the chunks of an answer are not consecutive")
    return int(rest.size or 0)


def _delete_pieces(tx: Tx, claims: Sequence[TaskLease]) -> None:
    tx.many(f"DELETE FROM task_pieces WHERE {_OF_ATTEMPT}", map(sql_rows.claim_parameters, claims))


def _end_attempts(
    tx: Tx, claims: Sequence[TaskLease], failure: task_pb2.TaskError, now: float, *, receipt: bytes = b""
) -> None:
    over = {"now": now, "receipt": receipt, **sql_rows.failure_parameters(failure)}
    tx.many(
        f"""UPDATE task_attempts SET ended_at = :now, reason = :reason, message = :message, receipt = :receipt
        WHERE {_OF_ATTEMPT} AND ended_at IS NULL""",
        [{**sql_rows.claim_parameters(each), **over} for each in claims],
    )
