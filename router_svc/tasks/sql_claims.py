"""Claims on SQL: everything that is written under one is fenced."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, bindparam, delete, func, insert, literal_column, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from router_svc.store.tables import task_attempts, task_pieces, tasks
from router_svc.tasks.lanes import Lane
from router_svc.tasks.rows import AT_ONCE
from router_svc.tasks.store_port import Claim, Ending, NewPiece
from weft.durable.tasks import TaskFailure, TaskState
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.request import Priority

MAX_ERROR_CHARS = 2_000
"""Of what is kept of why an attempt or a task failed."""

# Written out, because an index of some rows serves only statements that say which.
IS_PENDING: ColumnElement[bool] = tasks.c.state == literal_column("1")
IS_RUNNING: ColumnElement[bool] = tasks.c.state == literal_column("2")
IS_OVER: ColumnElement[bool] = tasks.c.state > literal_column("2")

Fence = Callable[[Claim], ColumnElement[bool]]

UNCLAIMED: Mapping[str, object] = {"owner": "", "lease_until": None, "lease_seconds": None}
"""Columns of a task that nobody runs."""
NOTHING_SAID: Mapping[str, object] = {"last_index": 0, "result_size": 0}
"""Columns of a task whose answer is forgotten."""


def fence(claim: Claim) -> ColumnElement[bool]:
    """The task, while this is still its claim."""
    return (
        (tasks.c.id == claim.task_id) & (tasks.c.owner == claim.owner) & (tasks.c.attempt == claim.attempt) & IS_RUNNING
    )


def expiry_at(now: float) -> ColumnElement[float]:
    """When a task fails unless it is begun, that waits again from now on."""
    return func.coalesce(tasks.c.window_ends_at, tasks.c.pending_limit_seconds + now)


def kept_text(text: str) -> str:
    """As much of it as is kept, of what every database takes."""
    return text[:MAX_ERROR_CHARS].replace("\x00", "").encode("utf-8", "replace").decode()


def lane_of(row: Any) -> Lane:
    """Where a row waits."""
    return Lane(row.model, row.tenant, Priority(row.band))


async def claim(connection: AsyncConnection, task_id: str, owner: str, now: float, lease_until: float) -> Claim | None:
    """See TaskStore.claim."""
    free = (
        select(tasks.c.seq)
        .where(tasks.c.id == task_id, IS_PENDING, tasks.c.ready_at <= now, tasks.c.expires_at > now)
        .with_for_update(skip_locked=True)
        .scalar_subquery()
    )
    taking = (
        update(tasks)
        .where(tasks.c.seq == free)
        .values(state=TaskState.RUNNING.value, owner=owner, attempt=tasks.c.attempt + 1, **NOTHING_SAID)
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
    """See TaskStore.renew."""
    renewal = (
        update(tasks)
        .where(IS_RUNNING, tasks.c.owner == owner)
        .values(lease_until=lease_until)
        .returning(tasks.c.id, tasks.c.attempt)
    )
    return frozenset(Claim(row.id, owner, row.attempt) for row in await connection.execute(renewal))


@dataclass(frozen=True, slots=True)
class FencedWrites:
    """What is written under a claim. Each is False where the claim is lost; then nothing was written."""

    fence: Fence

    async def append(self, connection: AsyncConnection, claim: Claim, pieces: Sequence[NewPiece]) -> bool:
        """See TaskStore.append. Pieces that are there from the first one's index on are replaced.

        Whoever does not know whether a write was done can so do it again. Raises INTERNAL where pieces are missing.
        """
        if not pieces:
            return await self._is_held(connection, claim)
        first, size = pieces[0].first_index, sum(len(piece.output) for piece in pieces)
        going_on = (
            update(tasks)
            .where(self.fence(claim), tasks.c.last_index == first - 1)
            .values(last_index=_last_of(pieces), result_size=tasks.c.result_size + size)
        )
        if not (await connection.execute(going_on)).rowcount and not await self._rewind(connection, claim, pieces):
            return False
        await connection.execute(insert(task_pieces), [_piece_values(claim, piece) for piece in pieces])
        return True

    async def end(self, connection: AsyncConnection, claim: Claim, ending: Ending, now: float) -> bool:
        """See TaskStore.end. True as well where it is done already: see `append`."""
        failure = ending.failure or TaskFailure(reason=Reason.UNSPECIFIED, message="")
        if not await self.append(connection, claim, ending.pieces):
            return await _has_ended_so(connection, claim, ending.state, failure)
        ended = (
            update(tasks)
            .where(self.fence(claim))
            .values(state=ending.state.value, ended_at=now, **UNCLAIMED)
            .values(error_reason=failure.reason.value, error_message=kept_text(failure.message))
        )
        if not (await connection.execute(ended)).rowcount:
            return False
        await end_attempts(connection, [claim], failure, now, receipt=ending.receipt)
        return True

    async def revert(
        self,
        connection: AsyncConnection,
        claim: Claim,
        failure: TaskFailure,
        *,
        receipt: bytes,
        counts: bool,
        now: float,
        ready_at: float,
    ) -> Lane | None:
        """See TaskStore.revert; where it waits again, None where the claim is lost."""
        again = (
            update(tasks)
            .where(self.fence(claim))
            .values(state=TaskState.PENDING.value, failures=tasks.c.failures + int(counts), **UNCLAIMED)
            .values(ready_at=ready_at if ready_at > now else AT_ONCE, expires_at=expiry_at(now), **NOTHING_SAID)
            .returning(tasks.c.model, tasks.c.tenant, tasks.c.band)
        )
        row = (await connection.execute(again)).first()
        if row is None:
            return None
        await forget_pieces(connection, [claim])
        await end_attempts(connection, [claim], failure, now, receipt=receipt)
        return lane_of(row)

    async def _is_held(self, connection: AsyncConnection, claim: Claim) -> bool:
        query = select(tasks.c.seq).where(self.fence(claim)).with_for_update()
        return (await connection.execute(query)).first() is not None

    async def _rewind(self, connection: AsyncConnection, claim: Claim, pieces: Sequence[NewPiece]) -> bool:
        """Forget what the pieces replace. False: the claim is lost."""
        first = pieces[0].first_index
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
            raise WeftError(Reason.INTERNAL, "an answer's pieces do not follow one another")
        total = int(size or 0) + sum(len(piece.output) for piece in pieces)
        longer = update(tasks).where(self.fence(claim)).values(last_index=_last_of(pieces), result_size=total)
        return bool((await connection.execute(longer)).rowcount)


_END_ATTEMPT = (
    update(task_attempts)
    .where(task_attempts.c.task_id == bindparam("of_task"), task_attempts.c.attempt == bindparam("of_attempt"))
    .where(task_attempts.c.ended_at.is_(None))
)
_FORGET_PIECES = delete(task_pieces).where(
    task_pieces.c.task_id == bindparam("of_task"), task_pieces.c.attempt == bindparam("of_attempt")
)


async def end_attempts(
    connection: AsyncConnection, claims: Sequence[Claim], failure: TaskFailure, now: float, *, receipt: bytes = b""
) -> None:
    """These claims are over."""
    over = {"ended_at": now, "reason": failure.reason.value, "message": kept_text(failure.message), "receipt": receipt}
    await connection.execute(_END_ATTEMPT, [_named(each) | over for each in claims])


async def forget_pieces(connection: AsyncConnection, claims: Sequence[Claim]) -> None:
    """What these attempts said counts no more."""
    await connection.execute(_FORGET_PIECES, [_named(each) for each in claims])


def _named(claim: Claim) -> dict[str, object]:
    return {"of_task": claim.task_id, "of_attempt": claim.attempt}


async def _has_ended_so(connection: AsyncConnection, claim: Claim, state: TaskState, failure: TaskFailure) -> bool:
    """Whether the task's end is this one: its writer was not told that it succeeded."""
    query = (
        select(tasks.c.seq)
        .join(task_attempts, (task_attempts.c.task_id == tasks.c.id) & (task_attempts.c.attempt == tasks.c.attempt))
        .where(tasks.c.id == claim.task_id, tasks.c.attempt == claim.attempt, tasks.c.state == state.value)
        .where(tasks.c.error_reason == failure.reason.value, tasks.c.error_message == kept_text(failure.message))
        .where(task_attempts.c.owner == claim.owner)
    )
    return (await connection.execute(query)).first() is not None


def _last_of(pieces: Sequence[NewPiece]) -> int:
    return pieces[-1].first_index + pieces[-1].event_count - 1


def _piece_values(claim: Claim, piece: NewPiece) -> dict[str, object]:
    return {
        "task_id": claim.task_id,
        "attempt": claim.attempt,
        "first_index": piece.first_index,
        "event_count": piece.event_count,
        "output": piece.output,
    }
