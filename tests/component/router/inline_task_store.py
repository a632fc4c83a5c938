"""The real task store on a database in memory; a test can let it fail or answer late, and look inside."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from typing_extensions import override

from router_svc.durable.tasks.sql_store import SqlTaskStore
from router_svc.durable.tasks.task_records import Lane, PendingTask, TaskLease, TaskOutcome
from router_svc.store.database import RouterDatabase
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.sql.connections import Row
from weft.sql.store import T, Work

if TYPE_CHECKING:
    import asyncio


class InlineDatabase(RouterDatabase):
    """Runs transactions on the event loop, since a fake clock waits for no thread. Outlives the routers on it."""

    def __init__(self) -> None:
        super().__init__("sqlite://")
        self.is_failing = False
        """Whether every call raises SERVICE_UNAVAILABLE."""
        self._begin(None)

    @override
    async def open(self, first: Work[None] | None = None) -> None: ...

    @override
    async def close(self) -> None: ...

    @override
    async def run(self, work: Work[T], *, vital: bool = False) -> T:
        if self.is_failing:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "the router's database failed", retry_after_seconds=1)
        return self.now(work)

    @override
    async def read(self, work: Work[T]) -> T:
        return await self.run(work)

    def now(self, work: Work[T]) -> T:
        """Runs a transaction."""
        self._connection.begin(writes=True)
        try:
            result = work(self._tx)
            self._connection.commit()
        except BaseException:
            self._roll_back()
            raise
        return result


class InlineTaskStore(SqlTaskStore):
    """See the module."""

    def __init__(self) -> None:
        self.database = InlineDatabase()
        super().__init__(self.database)
        self.claims: list[TaskLease] = []
        self.lane_reads = 0
        self.ended: list[tuple[TaskLease, TaskOutcome, bool]] = []
        """Every reported end, and whether it counted."""
        self.claims_answer_late: asyncio.Event | None = None
        """A claim that is on disk is acknowledged when it is set."""
        self.renewals_answer_late: asyncio.Event | None = None
        """A renewal that is on disk is acknowledged when it is set."""

    def row(self, task_id: str) -> Row:
        return self.database.now(lambda tx: tx.row("SELECT * FROM tasks WHERE id = :id", id=task_id))

    def pieces(self, task_id: str) -> Sequence[Row]:
        stored = "SELECT * FROM task_pieces WHERE task_id = :id ORDER BY attempt, first_index"
        return self.database.now(lambda tx: tx.rows(stored, id=task_id))

    @override
    async def pending(self, lane: Lane, now: float, limit: int, max_bytes: int) -> Sequence[PendingTask]:
        self.lane_reads += 1
        return await super().pending(lane, now, limit, max_bytes)

    @override
    async def claim(self, task_id: str, owner: str, now: float, lease_until: float) -> TaskLease | None:
        claim = await super().claim(task_id, owner, now, lease_until)
        if claim is not None:
            self.claims.append(claim)
            if self.claims_answer_late is not None:
                await self.claims_answer_late.wait()
        return claim

    @override
    async def renew(self, owner: str, lease_until: float) -> frozenset[TaskLease]:
        renewed = await super().renew(owner, lease_until)
        if self.renewals_answer_late is not None:
            await self.renewals_answer_late.wait()
        return renewed

    @override
    async def end(self, claim: TaskLease, outcome: TaskOutcome, now: float) -> bool:
        counted = await super().end(claim, outcome, now)
        self.ended.append((claim, outcome, counted))
        return counted
