"""The task port with timeouts."""

from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from typing_extensions import override

from weft.api.router.v1 import task_pb2
from weft.api.router.v1 import task_service_pb2 as pb
from weft.durable.tasks import TaskPort
from weft.kernel.time_limit import store_answer

Answer = TypeVar("Answer")


class TasksWithTimeout(TaskPort):
    """A TaskPort whose every method but `watch` raises SERVICE_UNAVAILABLE where the answer takes too long."""

    def __init__(self, tasks: TaskPort, *, timeout_seconds: float) -> None:
        self._tasks = tasks
        self._timeout_seconds = timeout_seconds

    @override
    async def submit(
        self, tenant: str, request: pb.SubmitTaskRequest, *, caller: str = "local"
    ) -> pb.SubmitTaskResponse:
        """A task whose submission timed out may exist: its idempotency key finds it."""
        return await self._in_time(self._tasks.submit(tenant, request, caller=caller))

    @override
    async def get(self, tenant: str, task_id: str) -> task_pb2.Task:
        return await self._in_time(self._tasks.get(tenant, task_id))

    @override
    async def details(self, tenant: str, task_id: str) -> pb.GetTaskResponse:
        return await self._in_time(self._tasks.details(tenant, task_id))

    @override
    async def list_page(self, tenant: str, request: pb.ListTasksRequest) -> pb.ListTasksResponse:
        return await self._in_time(self._tasks.list_page(tenant, request))

    @override
    async def cancel(self, tenant: str, task_id: str) -> task_pb2.Task:
        return await self._in_time(self._tasks.cancel(tenant, task_id))

    @override
    async def delete(self, tenant: str, task_id: str) -> None:
        await self._in_time(self._tasks.delete(tenant, task_id))

    @override
    def watch(self, tenant: str, task_id: str, after_event: int = 0) -> AsyncGenerator[pb.WatchTaskResponse]:
        """It has no timeout: a task may take hours."""
        return self._tasks.watch(tenant, task_id, after_event)

    async def _in_time(self, answer: Coroutine[Any, Any, Answer]) -> Answer:
        return await store_answer(self._timeout_seconds, answer, "task store", retry_after_seconds=2)
