"""Tasks in a router's database, SQLite or PostgreSQL. The statements are in the modules `sql_*`."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from sqlalchemy import ColumnElement
from sqlalchemy.ext.asyncio import AsyncConnection

from router_svc.durable.tasks import sql_reads, sql_rows, sql_transitions
from router_svc.durable.tasks.sql_transitions import moments_of
from router_svc.durable.tasks.store_port import (
    Claim,
    ExpiredLease,
    Lane,
    LaneFilled,
    ManyChanged,
    NewChunk,
    PendingTask,
    StoreEvent,
    TaskChanged,
    TaskOutcome,
    TaskRow,
)
from router_svc.durable.tasks.task_events import PostgresEvents, notify_routers
from router_svc.store.database import RouterDatabase
from router_svc.store.group_commit import GroupCommit
from weft.durable.tasks import Submitted, Task, TaskChunk, TaskDetails, TaskFailure, TaskPage, TaskQuery
from weft.kernel.clock import Clock, SystemClock
from weft.kernel.errors import WeftError
from weft.kernel.names import new_id
from weft.sql.moments import bring_back, is_any_ahead

Done = TypeVar("Done")


class SqlTaskStore:
    """See TaskStore. Life cycle: start, stop; the database is open in between, with others' or by itself.

    A writer that is cancelled, or told SERVICE_UNAVAILABLE while the connection breaks, does not know whether its write
    is on disk. `append` and `end` may be done again then. A claim that is on disk and that nobody knows of is prolonged
    by `renew` like all of its owner's: its owner finds it there, and reverts it.
    """

    def __init__(self, database: RouterDatabase, *, max_commit_batch: int, clock: Clock | None = None) -> None:
        self._database = database
        self._commits = GroupCommit(database, max_batch=max_commit_batch)
        self._origin = new_id("news")
        self._postgres_events = PostgresEvents(database, self._origin, clock or SystemClock())
        self._fenced = sql_transitions.FencedWrites(self._fence)
        self._is_open = False

    async def start(self) -> None:
        """Open. Raises SERVICE_UNAVAILABLE."""
        await self._database.open()
        self._is_open = True
        await self._commits.start()

    async def stop(self) -> None:
        """Whatever waits to be written is written first. Safe to call twice, or when never started."""
        await self._commits.stop()
        if self._is_open:
            # Others may still need the database: each who opened it closes it once.
            self._is_open = False
            await self._database.close()

    def _fence(self, claim: Claim) -> ColumnElement[bool]:
        """What everything is written under: no row, no claim. A method, so that a test can show what it is good for."""
        return sql_transitions.fence(claim)

    async def submit(self, row: TaskRow) -> Submitted:
        """See TaskStore.submit."""
        return await self._commits.share(self._submit_all, row)

    async def _submit_all(
        self, connection: AsyncConnection, rows: Sequence[TaskRow]
    ) -> Sequence[Submitted | WeftError]:
        done = await sql_rows.submit_rows(connection, rows)
        await self._tell(connection, [LaneFilled(row.lane) for row in rows])
        return done

    async def submitted(self, row: TaskRow) -> Submitted | None:
        """See TaskStore.submitted."""
        found = await self._read(lambda connection: sql_rows.find(connection, row))
        if isinstance(found, WeftError):
            raise found
        return found

    async def get(self, tenant: str, task_id: str) -> Task | None:
        """See TaskStore.get."""
        return await self._read(lambda connection: sql_reads.get(connection, tenant, task_id))

    async def details(self, tenant: str, task_id: str) -> TaskDetails | None:
        """See TaskStore.details."""
        return await self._read(lambda connection: sql_reads.details(connection, tenant, task_id))

    async def list_page(self, tenant: str, query: TaskQuery) -> TaskPage:
        """See TaskStore.list_page."""
        page = await self._read(lambda connection: sql_reads.list_page(connection, tenant, query))
        return replace(page, notice=self._database.notice)

    async def chunks(self, task_id: str, attempt: int, after_index: int, max_bytes: int) -> Sequence[TaskChunk]:
        """See TaskStore.chunks."""
        return await self._read(
            lambda connection: sql_reads.chunks(connection, task_id, attempt, after_index, max_bytes)
        )

    async def cancel(self, tenant: str, task_id: str, now: float) -> Task | None:
        """See TaskStore.cancel."""
        return await self._change(task_id, lambda connection: sql_transitions.cancel(connection, tenant, task_id, now))

    async def delete(self, tenant: str, task_id: str) -> Task | None:
        """See TaskStore.delete."""
        done = await self._change(task_id, lambda connection: sql_transitions.delete_ended(connection, tenant, task_id))
        if isinstance(done, WeftError):
            raise done
        return done

    async def lanes(self, now: float, after: Lane | None, limit: int) -> Sequence[Lane]:
        """See TaskStore.lanes."""
        return await self._read(lambda connection: sql_reads.lanes(connection, now, after, limit))

    async def pending(self, lane: Lane, now: float, limit: int, max_bytes: int) -> Sequence[PendingTask]:
        """See TaskStore.pending."""
        return await self._read(lambda connection: sql_reads.pending(connection, lane, now, limit, max_bytes))

    async def next_ready_at(self, now: float) -> float | None:
        """See TaskStore.next_ready_at."""
        return await self._read(lambda connection: sql_reads.next_ready_at(connection, now))

    async def claim(self, task_id: str, owner: str, now: float, lease_until: float) -> Claim | None:
        """See TaskStore.claim."""
        return await self._change(
            task_id, lambda connection: sql_transitions.claim(connection, task_id, owner, now, lease_until)
        )

    async def renew(self, owner: str, lease_until: float) -> frozenset[Claim]:
        """See TaskStore.renew."""
        return await self._commits.run(lambda connection: sql_transitions.renew(connection, owner, lease_until))

    async def append(self, claim: Claim, chunks: Sequence[NewChunk]) -> bool:
        """See TaskStore.append."""
        return await self._change(claim.task_id, lambda connection: self._fenced.append(connection, claim, chunks))

    async def end(self, claim: Claim, outcome: TaskOutcome, now: float) -> bool:
        """See TaskStore.end."""
        return await self._change(claim.task_id, lambda connection: self._fenced.end(connection, claim, outcome, now))

    async def revert(
        self, claim: Claim, failure: TaskFailure, *, receipt: bytes, counts: bool, now: float, ready_at: float
    ) -> bool:
        """See TaskStore.revert."""

        async def op(connection: AsyncConnection) -> bool:
            lane = await self._fenced.revert(
                connection, claim, failure, receipt=receipt, counts=counts, now=now, ready_at=ready_at
            )
            if lane is not None:
                await self._tell(connection, [TaskChanged(claim.task_id), LaneFilled(lane)])
            return lane is not None

        return await self._commits.run(op)

    async def revert_expired(self, now: float, limit: int) -> Sequence[ExpiredLease]:
        """See TaskStore.revert_expired."""

        async def op(connection: AsyncConnection) -> Sequence[ExpiredLease]:
            lost = await sql_transitions.revert_expired(connection, now, limit)
            changed = [TaskChanged(each.claim.task_id) for each in lost]
            await self._tell(connection, [*changed, *(LaneFilled(each.lane) for each in lost)])
            return lost

        return await self._commits.run(op)

    async def bring_back(self, now: float, longest_pause_seconds: float, limit: int) -> int:
        """See TaskStore.bring_back."""
        moments = moments_of(now, longest_pause_seconds)
        # Where there is nothing to do, which is nearly always, no writer waits for the looking.
        if not await self._read(lambda connection: is_any_ahead(connection, moments)):
            return 0

        async def op(connection: AsyncConnection) -> int:
            count = await bring_back(connection, moments, limit)
            await self._tell(connection, [ManyChanged()] if count else [])
            return count

        return await self._commits.run(op)

    async def fail_expired(self, now: float, limit: int) -> Sequence[str]:
        """See TaskStore.fail_expired."""

        async def op(connection: AsyncConnection) -> Sequence[str]:
            failed = await sql_transitions.fail_expired(connection, now, limit)
            await self._tell(connection, [TaskChanged(task_id) for task_id in failed])
            return failed

        return await self._commits.run(op)

    async def purge_ended(self, before: float, limit: int) -> int:
        """See TaskStore.purge_ended."""

        async def op(connection: AsyncConnection) -> int:
            count = await sql_transitions.purge_ended(connection, before, limit)
            await self._tell(connection, [ManyChanged()] if count else [])
            return count

        return await self._commits.run(op)

    async def open_counts(self) -> Mapping[str, int]:
        """See TaskStore.open_counts."""
        return await self._read(sql_reads.open_counts)

    async def database_now(self) -> float | None:
        """The one time of all routers, UTC seconds since the epoch; None on SQLite, where there is one router.

        Leases are compared with the `now` of whoever asks: routers correct theirs by this. Raises SERVICE_UNAVAILABLE.
        """
        return await self._read(sql_reads.database_now) if self._database.is_shared else None

    async def listen(self, heard: Callable[[StoreEvent], None]) -> None:
        """See TaskStore.listen."""
        if self._database.is_shared:
            await self._postgres_events.listen(heard)
        await asyncio.get_running_loop().create_future()

    async def _read(self, op: Callable[[AsyncConnection], Awaitable[Done]]) -> Done:
        async with self._database.reading() as connection:
            return await op(connection)

    async def _change(self, task_id: str, op: Callable[[AsyncConnection], Awaitable[Done]]) -> Done:
        """A write of one task. Where it came to nothing the news is of nothing: whoever looks sees that."""

        async def told(connection: AsyncConnection) -> Done:
            done = await op(connection)
            if done:
                await self._tell(connection, [TaskChanged(task_id)])
            return done

        return await self._commits.run(told)

    async def _tell(self, connection: AsyncConnection, events: Sequence[StoreEvent]) -> None:
        if events and self._database.is_shared:
            await notify_routers(connection, self._origin, events)
