"""The task store on a router's database, SQLite or PostgreSQL. The statements are in the modules `sql_*`."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from sqlalchemy import ColumnElement
from sqlalchemy.ext.asyncio import AsyncConnection
from typing_extensions import override

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
    TaskStore,
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


class SqlTaskStore(TaskStore):
    """A TaskStore on SQLAlchemy. Life cycle: start, stop; it keeps the shared database open in between.

    After a cancellation, or SERVICE_UNAVAILABLE from a broken connection, a writer does not know whether its write is
    on disk. `append` and `end` may then be repeated. A claim that is on disk without its owner knowing
    is renewed with the others; the owner finds it in the result of `renew` and reverts it.
    """

    def __init__(self, database: RouterDatabase, *, max_commit_batch: int, clock: Clock | None = None) -> None:
        self._database = database
        self._commits = GroupCommit(database, max_batch=max_commit_batch)
        self._origin = new_id("news")
        self._postgres_events = PostgresEvents(database, self._origin, clock or SystemClock())
        self._fenced = sql_transitions.FencedWrites(self._fence)
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

    def _fence(self, claim: Claim) -> ColumnElement[bool]:
        """Returns the condition of every write under a claim. A method, so that a negative control can remove it."""
        return sql_transitions.fence(claim)

    @override
    async def submit(self, row: TaskRow) -> Submitted:
        return await self._commits.share(self._submit_all, row)

    async def _submit_all(
        self, connection: AsyncConnection, rows: Sequence[TaskRow]
    ) -> Sequence[Submitted | WeftError]:
        done = await sql_rows.submit_rows(connection, rows)
        await self._publish(connection, [LaneFilled(row.lane) for row in rows])
        return done

    @override
    async def submitted(self, row: TaskRow) -> Submitted | None:
        found = await self._read(lambda connection: sql_rows.find(connection, row))
        if isinstance(found, WeftError):
            raise found
        return found

    @override
    async def get(self, tenant: str, task_id: str) -> Task | None:
        return await self._read(lambda connection: sql_reads.get(connection, tenant, task_id))

    @override
    async def details(self, tenant: str, task_id: str) -> TaskDetails | None:
        return await self._read(lambda connection: sql_reads.details(connection, tenant, task_id))

    @override
    async def list_page(self, tenant: str, query: TaskQuery) -> TaskPage:
        page = await self._read(lambda connection: sql_reads.list_page(connection, tenant, query))
        return replace(page, notice=self._database.notice)

    @override
    async def chunks(self, task_id: str, attempt: int, after_index: int, max_bytes: int) -> Sequence[TaskChunk]:
        return await self._read(
            lambda connection: sql_reads.chunks(connection, task_id, attempt, after_index, max_bytes)
        )

    @override
    async def cancel(self, tenant: str, task_id: str, now: float) -> Task | None:
        return await self._change(task_id, lambda connection: sql_transitions.cancel(connection, tenant, task_id, now))

    @override
    async def delete(self, tenant: str, task_id: str) -> Task | None:
        done = await self._change(task_id, lambda connection: sql_transitions.delete_ended(connection, tenant, task_id))
        if isinstance(done, WeftError):
            raise done
        return done

    @override
    async def lanes(self, now: float, after: Lane | None, limit: int) -> Sequence[Lane]:
        return await self._read(lambda connection: sql_reads.lanes(connection, now, after, limit))

    @override
    async def pending(self, lane: Lane, now: float, limit: int, max_bytes: int) -> Sequence[PendingTask]:
        return await self._read(lambda connection: sql_reads.pending(connection, lane, now, limit, max_bytes))

    @override
    async def next_ready_at(self, now: float) -> float | None:
        return await self._read(lambda connection: sql_reads.next_ready_at(connection, now))

    @override
    async def claim(self, task_id: str, owner: str, now: float, lease_until: float) -> Claim | None:
        return await self._change(
            task_id, lambda connection: sql_transitions.claim(connection, task_id, owner, now, lease_until)
        )

    @override
    async def renew(self, owner: str, lease_until: float) -> frozenset[Claim]:
        return await self._commits.run(lambda connection: sql_transitions.renew(connection, owner, lease_until))

    @override
    async def append(self, claim: Claim, chunks: Sequence[NewChunk]) -> bool:
        return await self._change(claim.task_id, lambda connection: self._fenced.append(connection, claim, chunks))

    @override
    async def end(self, claim: Claim, outcome: TaskOutcome, now: float) -> bool:
        return await self._change(claim.task_id, lambda connection: self._fenced.end(connection, claim, outcome, now))

    @override
    async def revert(
        self, claim: Claim, failure: TaskFailure, *, receipt: bytes, counts: bool, now: float, ready_at: float
    ) -> bool:

        async def op(connection: AsyncConnection) -> bool:
            lane = await self._fenced.revert(
                connection, claim, failure, receipt=receipt, counts=counts, now=now, ready_at=ready_at
            )
            if lane is not None:
                await self._publish(connection, [TaskChanged(claim.task_id), LaneFilled(lane)])
            return lane is not None

        return await self._commits.run(op)

    @override
    async def revert_expired(self, now: float, limit: int) -> Sequence[ExpiredLease]:

        async def op(connection: AsyncConnection) -> Sequence[ExpiredLease]:
            lost = await sql_transitions.revert_expired(connection, now, limit)
            changed = [TaskChanged(each.claim.task_id) for each in lost]
            await self._publish(connection, [*changed, *(LaneFilled(each.lane) for each in lost)])
            return lost

        return await self._commits.run(op)

    @override
    async def bring_back(self, now: float, longest_pause_seconds: float, limit: int) -> int:
        moments = moments_of(now, longest_pause_seconds)
        # Nearly always there is nothing to do; a read finds that out without delaying writers.
        if not await self._read(lambda connection: is_any_ahead(connection, moments)):
            return 0

        async def op(connection: AsyncConnection) -> int:
            count = await bring_back(connection, moments, limit)
            await self._publish(connection, [ManyChanged()] if count else [])
            return count

        return await self._commits.run(op)

    @override
    async def fail_expired(self, now: float, limit: int) -> Sequence[str]:

        async def op(connection: AsyncConnection) -> Sequence[str]:
            failed = await sql_transitions.fail_expired(connection, now, limit)
            await self._publish(connection, [TaskChanged(task_id) for task_id in failed])
            return failed

        return await self._commits.run(op)

    @override
    async def purge_ended(self, before: float, limit: int) -> int:

        async def op(connection: AsyncConnection) -> int:
            count = await sql_transitions.purge_ended(connection, before, limit)
            await self._publish(connection, [ManyChanged()] if count else [])
            return count

        return await self._commits.run(op)

    @override
    async def open_counts(self) -> Mapping[str, int]:
        return await self._read(sql_reads.open_counts)

    async def database_now(self) -> float | None:
        """Returns the database's UTC seconds since the epoch; None on SQLite, which has one router.

        Leases are compared with the caller's `now`, which routers derive from this. Raises SERVICE_UNAVAILABLE.
        """
        return await self._read(sql_reads.database_now) if self._database.is_shared else None

    @override
    async def listen(self, on_event: Callable[[StoreEvent], None]) -> None:
        if self._database.is_shared:
            await self._postgres_events.listen(on_event)
        await asyncio.get_running_loop().create_future()

    async def _read(self, op: Callable[[AsyncConnection], Awaitable[Done]]) -> Done:
        async with self._database.reading() as connection:
            return await op(connection)

    async def _change(self, task_id: str, op: Callable[[AsyncConnection], Awaitable[Done]]) -> Done:
        """Runs a write of one task, and publishes TaskChanged with it if it did anything."""

        async def op_with_event(connection: AsyncConnection) -> Done:
            done = await op(connection)
            if done:
                await self._publish(connection, [TaskChanged(task_id)])
            return done

        return await self._commits.run(op_with_event)

    async def _publish(self, connection: AsyncConnection, events: Sequence[StoreEvent]) -> None:
        if events and self._database.is_shared:
            await notify_routers(connection, self._origin, events)
