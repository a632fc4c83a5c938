"""The sweeps of tasks: fail expired tasks, purge old ones, and count each tenant's open tasks.

Times too far in the future, because a clock was set back, are corrected first.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

from router_svc.durable.limits import TaskLimits
from router_svc.durable.tasks.sql_store import SqlTaskStore
from router_svc.durable.tasks.task_records import ItemEnded, Lane, ManyChanged, StateCount, TaskChanged, TasksPurged
from router_svc.durable.tasks.task_run import TaskDeps
from router_svc.policy.task_release import KeepBounds, Release, ReleaseBound, releases
from weft.api.router.v1 import task_pb2
from weft.durable.tasks import state_name
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock

RECOUNT_SECONDS = 5.0
"""Minimum time between two counts for a tenant at its limit."""


class OpenTaskCounts:
    """Open tasks by tenant, for the quota `max_open_per_tenant`.

    Counted with every sweep. Only additions are known in between, so the count is an upper bound.
    """

    def __init__(self, store: SqlTaskStore, limits: TaskLimits, clock: Clock) -> None:
        self._store = store
        self._limits = limits
        self._clock = clock
        self._open: dict[str, int] = {}
        self._new: dict[str, int] = {}
        """Tasks added since the last count, by tenant."""
        self._counted_at = float("-inf")
        self._counting = asyncio.Lock()

    def add(self, tenant: str) -> None:
        """Counts a new task."""
        self._new[tenant] = self._new.get(tenant, 0) + 1

    async def require(self, tenant: str) -> None:
        """Raises TOO_MANY_RESOURCES if the tenant is at its limit."""
        if self._has_room(tenant):
            return
        if self._clock.monotonic() - self._counted_at >= RECOUNT_SECONDS:
            await self.count()
        if not self._has_room(tenant):
            raise WeftError(
                Reason.TOO_MANY_RESOURCES,
                f"the tenant has {self._limits.max_open_per_tenant} tasks that have not ended, its limit "
                "(router.tasks.max_open_per_tenant); submit more when some have ended",
                retry_after_seconds=RECOUNT_SECONDS,
            )

    async def count(self) -> None:
        """Counts the open tasks in the store. Raises SERVICE_UNAVAILABLE."""
        async with self._counting:
            self._counted_at = self._clock.monotonic()
            # Results come in transaction order, so everything added by then is in the count.
            self._open = dict(await self._store.open_counts())
            self._new = {}

    def _has_room(self, tenant: str) -> bool:
        return self._open.get(tenant, 0) + self._new.get(tenant, 0) < self._limits.max_open_per_tenant


log = get_logger("weft.tasks")


class TaskSweeps:
    """Sweeps tasks in bounded batches, so that other writes run in between."""

    def __init__(self, deps: TaskDeps, counts: OpenTaskCounts, refusals: Callable[[], Mapping[Lane, str]]) -> None:
        """`refusals`: why the last offers were refused."""
        self._store = deps.store
        self._events = deps.events
        self._counts = counts
        self._refusals = refusals
        self._database_clock = deps.database_clock
        self._limits = deps.limits
        self.released = dict.fromkeys(ReleaseBound, 0)
        """Number of finished tasks released early since the start, by bound."""
        self.states: Mapping[task_pb2.TaskState.ValueType, StateCount] = {}
        """Tasks by state, as of the last sweep."""

    async def sweep(self) -> None:
        """Sweeps once. Raises SERVICE_UNAVAILABLE."""
        await self._bring_back()
        await self._fail_expired()
        before, some = self._database_clock.now() - self._limits.keep_seconds, self._limits.sweep_batch
        while purged := await self._store.purge_ended(before, some):
            self._events.publish(TasksPurged(purged))
        await self._release()
        await self._counts.count()
        self.states = await self._store.state_counts()

    async def _release(self) -> None:
        """Releases the oldest finished tasks beyond the bounds."""
        limits = self._limits
        bounds = KeepBounds(
            max_per_tenant=limits.max_kept_per_tenant,
            max_tenant_bytes=limits.max_kept_tenant_bytes,
            max_bytes=limits.max_kept_bytes,
        )
        for wanted in releases(await self._store.kept_counts(), bounds):
            count, size = await self._release_until(wanted)
            self.released[wanted.bound] += count
            if count:
                log.warning(
                    "finished tasks released before their time",
                    bound=wanted.bound.value,
                    tenant=wanted.tenant or None,
                    tasks=count,
                    bytes=size,
                )

    async def _release_until(self, wanted: Release) -> tuple[int, int]:
        count, size = 0, 0
        while count < wanted.count or size < wanted.size:
            left = replace(wanted, count=max(0, wanted.count - count), size=max(0, wanted.size - size))
            released = await self._store.release_oldest(left, self._limits.sweep_batch)
            if not released:
                break  # The rest are items of batches with unwritten results.
            self._events.publish(TasksPurged(released.keys()))
            count, size = count + len(released), size + sum(released.values())
            await asyncio.sleep(0)
        return count, size

    async def _bring_back(self) -> None:
        clock, pause, some = self._database_clock, self._limits.max_retry_delay_seconds, self._limits.sweep_batch
        while moved := await self._store.bring_back(clock.now(), pause, some):
            log.warning("times of tasks were too far in the future: the clock was set back", moments=moved)
            self._events.publish(ManyChanged())
            await asyncio.sleep(0)

    async def _fail_expired(self) -> None:
        while True:
            now, some = self._database_clock.now(), self._limits.sweep_batch
            failed = await self._store.fail_expired(now, some, self._refusals())
            for task_id in failed:
                # The task's failure has the exceeded limit.
                log.info("task ended", task=task_id, state=state_name(task_pb2.TASK_STATE_FAILED), reason="EXPIRED")
                self._events.publish(TaskChanged(task_id))
            if failed:
                self._events.publish(ItemEnded(""))
            if len(failed) < self._limits.sweep_batch:
                return
            await asyncio.sleep(0)
