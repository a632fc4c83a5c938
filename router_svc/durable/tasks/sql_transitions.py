"""State transitions of tasks on SQL: claim, renew, append, end, revert, cancel, delete, expire and purge.

Every write under a claim is fenced: it changes nothing if the claim is not the task's any more.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Row, bindparam, delete, exists, func, insert, literal_column, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from router_svc.durable.tasks.sql_rows import READY_NOW, STAGED, task_of
from router_svc.durable.tasks.store_port import LOST_LEASE, Claim, ExpiredLease, Lane, NewChunk, TaskOutcome
from router_svc.store.tables import batches, task_attempts, task_pieces, tasks
from weft.api.router.v1 import batch_service_pb2 as batch_pb
from weft.api.router.v1 import task_pb2
from weft.durable.tasks import task_error
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.request import Priority
from weft.sql.moments import BoundedMoment

MAX_ERROR_CHARS = 2_000
"""Characters of an error message that are stored."""

# Literals: a partial index serves only statements that repeat its condition.
IS_PENDING: ColumnElement[bool] = tasks.c.state == literal_column("1")
IS_RUNNING: ColumnElement[bool] = tasks.c.state == literal_column("2")
IS_TERMINAL: ColumnElement[bool] = tasks.c.state > literal_column("2")

Fence = Callable[[Claim], ColumnElement[bool]]

UNCLAIMED: Mapping[str, object] = {"owner": "", "lease_until": None, "lease_seconds": None}
"""Columns of a task without a claim."""
NO_OUTPUT: Mapping[str, object] = {"last_index": 0, "result_size": 0}
"""Columns of a task whose answer is discarded."""


def fence(claim: Claim) -> ColumnElement[bool]:
    """Returns the condition that selects the task while this is its claim."""
    return (
        (tasks.c.id == claim.task_id) & (tasks.c.owner == claim.owner) & (tasks.c.attempt == claim.attempt) & IS_RUNNING
    )


def expiry_at(now: float) -> ColumnElement[float]:
    """Returns when a task expires that is pending again from now on."""
    return func.coalesce(tasks.c.window_ends_at, tasks.c.pending_limit_seconds + now)


def kept_text(text: str) -> str:
    """Returns an error text as it is stored: cut, without characters that a database refuses."""
    return text[:MAX_ERROR_CHARS].replace("\x00", "").encode("utf-8", "replace").decode()


def lane_of(row: Any) -> Lane:
    """Returns the lane of a row."""
    return Lane(row.model, row.tenant, Priority(row.band))


async def claim(connection: AsyncConnection, task_id: str, owner: str, now: float, lease_until: float) -> Claim | None:
    """Implements `TaskStore.claim`."""
    free = (
        select(tasks.c.seq)
        .where(tasks.c.id == task_id, IS_PENDING, tasks.c.ready_at <= now, tasks.c.expires_at > now)
        .with_for_update(skip_locked=True)
        .scalar_subquery()
    )
    taking = (
        update(tasks)
        .where(tasks.c.seq == free)
        .values(state=task_pb2.TASK_STATE_RUNNING, owner=owner, attempt=tasks.c.attempt + 1, **NO_OUTPUT)
        .values(lease_until=lease_until, lease_seconds=lease_until - now, started_at=now)
        .returning(tasks.c.attempt)
    )
    attempt: int | None = (await connection.execute(taking)).scalar_one_or_none()
    if attempt is None:
        return None
    begun = {"task_id": task_id, "attempt": attempt, "owner": owner, "claimed_at": now, "ended_at": None}
    nothing = {"reason": Reason.UNSPECIFIED.value, "message": "", "receipt": b""}
    await connection.execute(insert(task_attempts), begun | nothing)
    return Claim(task_id, owner, attempt)


async def renew(connection: AsyncConnection, owner: str, lease_until: float) -> frozenset[Claim]:
    """Implements `TaskStore.renew`."""
    renewal = (
        update(tasks)
        .where(IS_RUNNING, tasks.c.owner == owner)
        .values(lease_until=lease_until)
        .returning(tasks.c.id, tasks.c.attempt)
    )
    return frozenset(Claim(row.id, owner, row.attempt) for row in await connection.execute(renewal))


@dataclass(frozen=True, slots=True)
class FencedWrites:
    """Writes under a claim. Each returns False, and writes nothing, if the claim is lost."""

    fence: Fence

    async def append(self, connection: AsyncConnection, claim: Claim, chunks: Sequence[NewChunk]) -> bool:
        """Appends chunks; stored ones from the first one's index on are replaced.

        So a write with an unknown result can be repeated. Raises INTERNAL if the chunks are not consecutive.
        """
        if not chunks:
            return await self._is_held(connection, claim)
        first, size = chunks[0].first_index, sum(len(chunk.output) for chunk in chunks)
        going_on = (
            update(tasks)
            .where(self.fence(claim), tasks.c.last_index == first - 1)
            .values(last_index=_last_of(chunks), result_size=tasks.c.result_size + size)
        )
        if not (await connection.execute(going_on)).rowcount and not await self._rewind(connection, claim, chunks):
            return False
        await connection.execute(insert(task_pieces), [_chunk_values(claim, chunk) for chunk in chunks])
        return True

    async def end(self, connection: AsyncConnection, claim: Claim, outcome: TaskOutcome, now: float) -> bool:
        """Ends the task. Also True if this very end is stored already, so that it can be repeated as `append`."""
        failure = outcome.failure or task_pb2.TaskError()
        if not await self.append(connection, claim, outcome.chunks):
            return await _has_ended_so(connection, claim, outcome.state, failure)
        ended = (
            update(tasks)
            .where(self.fence(claim))
            .values(state=outcome.state, ended_at=now, **UNCLAIMED)
            .values(error_reason=failure.reason, error_message=kept_text(failure.message))
        )
        if not (await connection.execute(ended)).rowcount:
            return False
        await end_attempts(connection, [claim], failure, now, receipt=outcome.receipt)
        return True

    async def revert(
        self,
        connection: AsyncConnection,
        claim: Claim,
        failure: task_pb2.TaskError,
        *,
        receipt: bytes,
        counts: bool,
        now: float,
        ready_at: float,
    ) -> Lane | None:
        """Reverts the attempt; returns the lane of the task, None if the claim is lost."""
        again = (
            update(tasks)
            .where(self.fence(claim))
            .values(state=task_pb2.TASK_STATE_PENDING, failures=tasks.c.failures + int(counts), **UNCLAIMED)
            .values(ready_at=ready_at if ready_at > now else READY_NOW, expires_at=expiry_at(now), **NO_OUTPUT)
            .returning(tasks.c.model, tasks.c.tenant, tasks.c.band)
        )
        row = (await connection.execute(again)).first()
        if row is None:
            return None
        await delete_chunks(connection, [claim])
        await end_attempts(connection, [claim], failure, now, receipt=receipt)
        return lane_of(row)

    async def _is_held(self, connection: AsyncConnection, claim: Claim) -> bool:
        query = select(tasks.c.seq).where(self.fence(claim)).with_for_update()
        return (await connection.execute(query)).first() is not None

    async def _rewind(self, connection: AsyncConnection, claim: Claim, chunks: Sequence[NewChunk]) -> bool:
        """Deletes the chunks that the new ones replace. False: the claim is lost."""
        first = chunks[0].first_index
        query = select(tasks.c.last_index).where(self.fence(claim)).with_for_update()
        last: int | None = (await connection.execute(query)).scalar_one_or_none()
        if last is None:
            return False
        of_attempt = (task_pieces.c.task_id == claim.task_id) & (task_pieces.c.attempt == claim.attempt)
        await connection.execute(delete(task_pieces).where(of_attempt, task_pieces.c.first_index >= first))
        end = func.max(task_pieces.c.first_index + task_pieces.c.event_count)
        rest = select(end, func.sum(func.length(task_pieces.c.output))).where(of_attempt)
        next_index, size = (await connection.execute(rest)).one()
        if (next_index or 1) != first:
            raise WeftError(Reason.INTERNAL, "the chunks of an answer are not consecutive")
        total = int(size or 0) + sum(len(chunk.output) for chunk in chunks)
        longer = update(tasks).where(self.fence(claim)).values(last_index=_last_of(chunks), result_size=total)
        return bool((await connection.execute(longer)).rowcount)


_END_ATTEMPT = (
    update(task_attempts)
    .where(task_attempts.c.task_id == bindparam("of_task"), task_attempts.c.attempt == bindparam("of_attempt"))
    .where(task_attempts.c.ended_at.is_(None))
)
_DELETE_CHUNKS = delete(task_pieces).where(
    task_pieces.c.task_id == bindparam("of_task"), task_pieces.c.attempt == bindparam("of_attempt")
)


async def end_attempts(
    connection: AsyncConnection,
    claims: Sequence[Claim],
    failure: task_pb2.TaskError,
    now: float,
    *,
    receipt: bytes = b"",
) -> None:
    """Writes the end of these attempts."""
    over = {"ended_at": now, "reason": failure.reason, "message": kept_text(failure.message), "receipt": receipt}
    await connection.execute(_END_ATTEMPT, [_named(each) | over for each in claims])


async def delete_chunks(connection: AsyncConnection, claims: Sequence[Claim]) -> None:
    """Deletes the chunks of these attempts."""
    await connection.execute(_DELETE_CHUNKS, [_named(each) for each in claims])


def _named(claim: Claim) -> dict[str, object]:
    return {"of_task": claim.task_id, "of_attempt": claim.attempt}


async def _has_ended_so(
    connection: AsyncConnection, claim: Claim, state: "task_pb2.TaskState.ValueType", failure: task_pb2.TaskError
) -> bool:
    """Whether the task has ended this way already: the earlier write succeeded, and its acknowledgement was lost."""
    query = (
        select(tasks.c.seq)
        .join(task_attempts, (task_attempts.c.task_id == tasks.c.id) & (task_attempts.c.attempt == tasks.c.attempt))
        .where(tasks.c.id == claim.task_id, tasks.c.attempt == claim.attempt, tasks.c.state == state)
        .where(tasks.c.error_reason == failure.reason, tasks.c.error_message == kept_text(failure.message))
        .where(task_attempts.c.owner == claim.owner)
    )
    return (await connection.execute(query)).first() is not None


def _last_of(chunks: Sequence[NewChunk]) -> int:
    return chunks[-1].first_index + chunks[-1].event_count - 1


def _chunk_values(claim: Claim, chunk: NewChunk) -> dict[str, object]:
    return {
        "task_id": claim.task_id,
        "attempt": claim.attempt,
        "first_index": chunk.first_index,
        "event_count": chunk.event_count,
        "output": chunk.output,
    }


_BY_OWNER = task_error(Reason.CANCELLED, "it was cancelled")
_LOST = task_error(LOST_LEASE, "the router that ran it gave no sign of life")
_UNWRITTEN = (batch_pb.BATCH_STATE_IN_PROGRESS, batch_pb.BATCH_STATE_FINALIZING)
"""States of batches whose results are still to be written from their items."""
_END = update(tasks).where(tasks.c.seq == bindparam("of_seq"))


async def cancel(connection: AsyncConnection, tenant: str, task_id: str, now: float) -> task_pb2.Task | None:
    """Implements `TaskStore.cancel`."""
    row = await _owned(connection, tenant, task_id)
    if row is None or row.state >= task_pb2.TASK_STATE_COMPLETED:
        return None if row is None else task_of(row)
    ended = update(tasks).where(tasks.c.seq == row.seq).returning(tasks)
    values = {"state": task_pb2.TASK_STATE_CANCELLED, "ended_at": now, **UNCLAIMED}
    after = (await connection.execute(ended.values(values))).one()
    if row.state == task_pb2.TASK_STATE_RUNNING:
        await end_attempts(connection, [Claim(task_id, row.owner, row.attempt)], _BY_OWNER, now)
    task = task_of(after)
    task.owner = row.owner
    return task


async def delete_ended(connection: AsyncConnection, tenant: str, task_id: str) -> task_pb2.Task | WeftError | None:
    """Deletes a terminal task; returns it, or the error."""
    row = await _owned(connection, tenant, task_id)
    if row is None:
        return None
    if row.state < task_pb2.TASK_STATE_COMPLETED:
        return WeftError(Reason.RESOURCE_IN_USE, f"task {task_id} has not ended; cancel it first")
    await connection.execute(delete(tasks).where(tasks.c.seq == row.seq))
    return task_of(row)


async def revert_expired(connection: AsyncConnection, now: float, limit: int) -> Sequence[ExpiredLease]:
    """Implements `TaskStore.revert_expired`."""
    over = (
        select(tasks)
        .where(IS_RUNNING, tasks.c.lease_until <= now)
        .order_by(tasks.c.lease_until)
        .limit(limit)
        # A row that is locked by another router is being renewed, or reverted there.
        .with_for_update(skip_locked=True)
    )
    rows = (await connection.execute(over)).all()
    if not rows:
        return ()
    lost = [_lost(row) for row in rows]
    claims = [each.claim for each in lost]
    again = [_again(row) for row, each in zip(rows, lost, strict=True) if each.state == task_pb2.TASK_STATE_PENDING]
    failed = [
        _failed(row, now) for row, each in zip(rows, lost, strict=True) if each.state == task_pb2.TASK_STATE_FAILED
    ]
    if again:
        await connection.execute(_END.values(expires_at=expiry_at(now)), again)
    if failed:
        await connection.execute(_END, failed)
    await delete_chunks(connection, claims)
    await end_attempts(connection, claims, _LOST, now)
    return lost


async def fail_expired(connection: AsyncConnection, now: float, limit: int) -> Sequence[str]:
    """Implements `TaskStore.fail_expired`."""
    over = (
        select(tasks.c.seq, tasks.c.id, tasks.c.attempt, tasks.c.window_ends_at, tasks.c.pending_limit_seconds)
        .where(IS_PENDING, tasks.c.expires_at <= now)
        .order_by(tasks.c.expires_at)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    rows = (await connection.execute(over)).all()
    if rows:
        await connection.execute(_END, [_ended(row.seq, now, _why_never(row)) for row in rows])
    return [row.id for row in rows]


async def purge_ended(connection: AsyncConnection, before: float, limit: int) -> int:
    """Implements `TaskStore.purge_ended`."""
    is_awaited = exists().where(batches.c.id == tasks.c.batch_id, batches.c.state.in_(_UNWRITTEN))
    old = select(tasks.c.seq).where(IS_TERMINAL, tasks.c.ended_at < before, ~is_awaited)
    old = old.order_by(tasks.c.ended_at).limit(limit)
    done = await connection.execute(delete(tasks).where(tasks.c.seq.in_(old.with_for_update(skip_locked=True))))
    return done.rowcount


async def _owned(connection: AsyncConnection, tenant: str, task_id: str) -> Row[Any] | None:
    query = select(tasks).where(tasks.c.id == task_id, tasks.c.tenant == tenant, tasks.c.state != STAGED)
    return (await connection.execute(query.with_for_update())).first()


def _lost(row: Any) -> ExpiredLease:
    is_last = row.failures + 1 >= row.max_attempts
    return ExpiredLease(
        claim=Claim(row.id, row.owner, row.attempt),
        lane=lane_of(row),
        state=task_pb2.TASK_STATE_FAILED if is_last else task_pb2.TASK_STATE_PENDING,
    )


def _again(row: Any) -> dict[str, object]:
    state = {"of_seq": row.seq, "state": task_pb2.TASK_STATE_PENDING, "failures": row.failures + 1}
    return {**state, "ready_at": READY_NOW, **UNCLAIMED, **NO_OUTPUT}


def _failed(row: Any, now: float) -> dict[str, object]:
    times = f"{row.failures + 1} attempts" if row.failures else "1 attempt"
    failure = task_error(LOST_LEASE, f"{_LOST.message}; given up after {times}")
    return _ended(row.seq, now, failure) | {"failures": row.failures + 1, **NO_OUTPUT}


def _ended(seq: int, now: float, failure: task_pb2.TaskError) -> dict[str, object]:
    why = {"error_reason": failure.reason, "error_message": failure.message}
    return {"of_seq": seq, "state": task_pb2.TASK_STATE_FAILED, "ended_at": now, **UNCLAIMED, **why}


def _why_never(row: Any) -> task_pb2.TaskError:
    begun = "begun again" if row.attempt else "begun"
    if row.window_ends_at is not None:
        return task_error(Reason.DEADLINE_EXCEEDED, f"its window ended before it was {begun}")
    waited = f"it waited {row.pending_limit_seconds:g} s and was not {begun}: no runner had a slot for it"
    return task_error(Reason.QUEUE_TIMEOUT, waited)


UNKNOWN_LEASE_SECONDS = 60.0
"""Length of a lease that an earlier release wrote without its length; longer than that release's default."""


def moments_of(now: float, longest_pause_seconds: float) -> Sequence[BoundedMoment]:
    """Returns the latest possible times of tasks; `longest_pause_seconds`: the longest retry pause."""
    c = tasks.c
    lease = func.coalesce(c.lease_seconds, UNKNOWN_LEASE_SECONDS)
    has_window = c.window_ends_at.is_not(None)
    return (
        BoundedMoment(key=c.seq, column=c.lease_until, latest=now + lease, where=IS_RUNNING),
        BoundedMoment(key=c.seq, column=c.ready_at, latest=now + longest_pause_seconds, where=IS_PENDING),
        BoundedMoment(
            key=c.seq,
            column=c.expires_at,
            latest=now + c.pending_limit_seconds,
            where=IS_PENDING & c.window_ends_at.is_(None),
        ),
        # A window begins with the creation of its batch.
        BoundedMoment(
            key=c.seq,
            column=c.created_at,
            latest=now,
            where=(IS_PENDING | IS_RUNNING) & has_window,
            along=(c.window_ends_at, c.expires_at),
        ),
        BoundedMoment(key=c.seq, column=c.ended_at, latest=now, where=IS_TERMINAL),
    )
