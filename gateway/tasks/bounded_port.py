"""Whoever runs tasks, asked within a time: a request must not wait for ever because nobody answers."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from typing import TypeVar

from weft.durable.tasks import NewTask, Submitted, Task, TaskDetails, TaskEvent, TaskPage, TaskPort, TaskQuery
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

Answer = TypeVar("Answer")


class BoundedTasks:
    """A TaskPort whose every method but `watch` raises SERVICE_UNAVAILABLE where the answer takes too long."""

    def __init__(self, tasks: TaskPort, *, timeout_seconds: float) -> None:
        self._tasks = tasks
        self._timeout_seconds = timeout_seconds

    async def submit(self, new: NewTask) -> Submitted:
        """See TaskPort.submit. One that took too long may be durable all the same: its idempotency key finds it."""
        return await self._in_time(self._tasks.submit(new))

    async def get(self, tenant: str, task_id: str) -> Task:
        """See TaskPort.get."""
        return await self._in_time(self._tasks.get(tenant, task_id))

    async def details(self, tenant: str, task_id: str) -> TaskDetails:
        """See TaskPort.details."""
        return await self._in_time(self._tasks.details(tenant, task_id))

    async def list_page(self, tenant: str, query: TaskQuery) -> TaskPage:
        """See TaskPort.list_page."""
        return await self._in_time(self._tasks.list_page(tenant, query))

    async def cancel(self, tenant: str, task_id: str) -> Task:
        """See TaskPort.cancel."""
        return await self._in_time(self._tasks.cancel(tenant, task_id))

    async def delete(self, tenant: str, task_id: str) -> None:
        """See TaskPort.delete."""
        await self._in_time(self._tasks.delete(tenant, task_id))

    def watch(self, tenant: str, task_id: str, after_event: int = 0) -> AsyncGenerator[TaskEvent]:
        """See TaskPort.watch. A task may take hours: who watches has its own end."""
        return self._tasks.watch(tenant, task_id, after_event)

    async def _in_time(self, answer: Awaitable[Answer]) -> Answer:
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await answer
        except TimeoutError:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "task store timed out", retry_after_seconds=2) from None
