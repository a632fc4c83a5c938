"""The task store on a router's database, SQLite or PostgreSQL: its writes, over the reads of `sql_reads`."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from sqlalchemy import ColumnElement
from sqlalchemy.ext.asyncio import AsyncConnection
from typing_extensions import override

from router_svc.durable.tasks import sql_rows, sql_transitions
from router_svc.durable.tasks.sql_reads import SqlTaskReads
from router_svc.durable.tasks.sql_transitions import moments_of
from router_svc.durable.tasks.store_port import (
    Claim,
    ExpiredLease,
    LaneFilled,
    ManyChanged,
    NewChunk,
    StoreEvent,
    TaskChanged,
    TaskOutcome,
    TaskRow,
    TaskStore,
)
from router_svc.durable.tasks.task_events import PostgresEvents, notify_routers
from router_svc.store.database import RouterDatabase
from router_svc.store.group_commit import GroupCommit
from weft.api.router.v1 import task_pb2
from weft.api.router.v1 import task_service_pb2 as pb
from weft.kernel.clock import Clock, SystemClock
from weft.kernel.errors import WeftError
from weft.kernel.names import new_id
from weft.sql.moments import bring_back, is_any_ahead

Done = TypeVar("Done")


class SqlTaskStore(SqlTaskReads, TaskStore):
    """A TaskStore on SQLAlchemy. Life cycle: start, stop; it keeps the shared database open in between.

    After a cancellation, or SERVICE_UNAVAILABLE from a broken connection, a writer does not know whether its write is
    on disk. `append` and `end` may then be repeated. A claim that is on disk without its owner knowing
    is renewed with the others; the owner finds it in the result of `renew` and reverts it.
    """

    def __init__(self, database: RouterDatabase, *, max_commit_batch: int, clock: Clock | None = None) -> None:
        super().__init__(database)
        self._commits = GroupCommit(database, max_batch=max_commit_batch)
        self._origin = new_id("events")
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
    async def submit(self, row: TaskRow) -> pb.SubmitTaskResponse:
        return await self._commits.share(self._submit_all, row)

    async def _submit_all(
        self, connection: AsyncConnection, rows: Sequence[TaskRow]
    ) -> Sequence[pb.SubmitTaskResponse | WeftError]:
        done = await sql_rows.submit_rows(connection, rows)
        await self._publish(connection, [LaneFilled(row.lane) for row in rows])
        return done

    @override
    async def cancel(self, tenant: str, task_id: str, now: float) -> task_pb2.Task | None:
        return await self._write(
            lambda connection: sql_transitions.cancel(connection, tenant, task_id, now), _changes_of(task_id)
        )

    @override
    async def delete(self, tenant: str, task_id: str) -> task_pb2.Task | None:
        done = await self._write(
            lambda connection: sql_transitions.delete_ended(connection, tenant, task_id), _changes_of(task_id)
        )
        if isinstance(done, WeftError):
            raise done
        return done

    @override
    async def claim(self, task_id: str, owner: str, now: float, lease_until: float) -> Claim | None:
        return await self._write(
            lambda connection: sql_transitions.claim(connection, task_id, owner, now, lease_until),
            _changes_of(task_id),
        )

    @override
    async def renew(self, owner: str, lease_until: float) -> frozenset[Claim]:
        return await self._commits.run(lambda connection: sql_transitions.renew(connection, owner, lease_until))

    @override
    async def append(self, claim: Claim, chunks: Sequence[NewChunk]) -> bool:
        return await self._write(
            lambda connection: self._fenced.append(connection, claim, chunks), _changes_of(claim.task_id)
        )

    @override
    async def end(self, claim: Claim, outcome: TaskOutcome, now: float) -> bool:
        return await self._write(
            lambda connection: self._fenced.end(connection, claim, outcome, now), _changes_of(claim.task_id)
        )

    @override
    async def revert(
        self, claim: Claim, failure: task_pb2.TaskError, *, receipt: bytes, counts: bool, now: float, ready_at: float
    ) -> bool:
        lane = await self._write(
            lambda connection: self._fenced.revert(
                connection, claim, failure, receipt=receipt, counts=counts, now=now, ready_at=ready_at
            ),
            lambda lane: () if lane is None else (TaskChanged(claim.task_id), LaneFilled(lane)),
        )
        return lane is not None

    @override
    async def revert_expired(self, now: float, limit: int) -> Sequence[ExpiredLease]:
        return await self._write(
            lambda connection: sql_transitions.revert_expired(connection, now, limit),
            lambda lost: [
                *(TaskChanged(each.claim.task_id) for each in lost),
                *(LaneFilled(each.lane) for each in lost),
            ],
        )

    @override
    async def bring_back(self, now: float, longest_pause_seconds: float, limit: int) -> int:
        moments = moments_of(now, longest_pause_seconds)
        # Nearly always there is nothing to do; a read finds that out without delaying writers.
        async with self._database.reading() as connection:
            if not await is_any_ahead(connection, moments):
                return 0
        return await self._write(lambda connection: bring_back(connection, moments, limit), _many_changed)

    @override
    async def fail_expired(self, now: float, limit: int) -> Sequence[str]:
        return await self._write(
            lambda connection: sql_transitions.fail_expired(connection, now, limit),
            lambda failed: [TaskChanged(task_id) for task_id in failed],
        )

    @override
    async def purge_ended(self, before: float, limit: int) -> int:
        return await self._write(
            lambda connection: sql_transitions.purge_ended(connection, before, limit), _many_changed
        )

    @override
    async def listen(self, on_event: Callable[[StoreEvent], None]) -> None:
        if self._database.is_shared:
            await self._postgres_events.listen(on_event)
        await asyncio.get_running_loop().create_future()

    async def _write(
        self, op: Callable[[AsyncConnection], Awaitable[Done]], events_of: Callable[[Done], Sequence[StoreEvent]]
    ) -> Done:
        """Runs a write, and publishes the events of its result with it."""

        async def op_with_events(connection: AsyncConnection) -> Done:
            done = await op(connection)
            await self._publish(connection, events_of(done))
            return done

        return await self._commits.run(op_with_events)

    async def _publish(self, connection: AsyncConnection, events: Sequence[StoreEvent]) -> None:
        if events and self._database.is_shared:
            await notify_routers(connection, self._origin, events)


def _changes_of(task_id: str) -> Callable[[object], Sequence[StoreEvent]]:
    """Returns what a write of one task publishes, if it did anything."""
    return lambda done: (TaskChanged(task_id),) if done else ()


def _many_changed(count: int) -> Sequence[StoreEvent]:
    return (ManyChanged(),) if count else ()
