"""Housekeeping: tasks that waited too long fail, tasks that are long over are forgotten, and tenants are counted.

What lies further off than it can, because the clock was set back, is brought back first.
"""

import asyncio

import structlog

from router_svc.tasks.config import TaskLimits
from router_svc.tasks.open_counts import OpenCounts
from router_svc.tasks.signals import ManyChanged, TaskChanged, TaskSignals
from router_svc.tasks.store_port import TaskStore
from router_svc.tasks.wall import Wall
from weft.durable.tasks import TaskState
from weft.kernel.errors import WeftError

log = structlog.get_logger("weft.tasks")


class TaskSweeper:
    """Sweeps in bounded batches, so that others have their turn in between."""

    def __init__(
        self, store: TaskStore, signals: TaskSignals, counts: OpenCounts, wall: Wall, limits: TaskLimits
    ) -> None:
        self._store = store
        self._signals = signals
        self._counts = counts
        self._wall = wall
        self._limits = limits

    async def run(self) -> None:
        """Sweep until cancelled, at once for the first time."""
        while True:
            try:
                await self.sweep()
            except WeftError as error:
                # The next round does again what this one could not.
                log.warning("tasks were not swept", why=error.message)
            await self._wall.clock.sleep(self._limits.sweep_interval_seconds)

    async def sweep(self) -> None:
        """One round. Raises SERVICE_UNAVAILABLE."""
        await self._bring_back()
        await self._fail_expired()
        await self._forget_ended()
        await self._counts.count()

    async def _bring_back(self) -> None:
        limits = self._limits
        while True:
            moved = await self._store.bring_back(self._wall.now(), limits.max_retry_delay_seconds, limits.sweep_batch)
            if not moved:
                return
            log.warning("moments of tasks lay too far off: the clock was set back", moments=moved)
            self._signals.announce(ManyChanged())
            await asyncio.sleep(0)

    async def _fail_expired(self) -> None:
        while True:
            failed = await self._store.fail_expired(self._wall.now(), self._limits.sweep_batch)
            for task_id in failed:
                # The task says which of its limits it was.
                log.info("task ended", task=task_id, state=TaskState.FAILED.name, reason="EXPIRED")
                self._signals.announce(TaskChanged(task_id))
            if len(failed) < self._limits.sweep_batch:
                return
            await asyncio.sleep(0)

    async def _forget_ended(self) -> None:
        before = self._wall.now() - self._limits.keep_seconds
        while True:
            forgotten = await self._store.forget_ended(before, self._limits.sweep_batch)
            if forgotten < self._limits.sweep_batch:
                return
            await asyncio.sleep(0)
