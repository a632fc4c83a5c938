"""A `TaskPort` whose router is behind a channel."""

from collections.abc import AsyncGenerator, Awaitable
from typing import TYPE_CHECKING, TypeVar, cast

import grpc

from weft.api.router.v1 import task_service_pb2 as pb
from weft.api.router.v1 import task_service_pb2_grpc
from weft.durable.task_messages import attempt_of_message, event_of, task_of
from weft.durable.tasks import NewTask, Submitted, Task, TaskDetails, TaskEvent, TaskPage, TaskQuery
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.rpc import error_from_call

if TYPE_CHECKING:
    from weft.api.router.v1.task_service_pb2_grpc import TaskServiceAsyncStub

TENANT = "x-tenant-id"
TIMEOUT_SECONDS = 30.0
"""Timeout of every call but watch. A router whose database is locked answers within it."""

AnswerT = TypeVar("AnswerT")


class RemoteTasks:
    """A TaskPort over gRPC. The tenant is sent as metadata: the caller must be trusted with it."""

    def __init__(self, channel: grpc.aio.Channel, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._timeout_seconds = timeout_seconds
        self._stub = cast("TaskServiceAsyncStub", task_service_pb2_grpc.TaskServiceStub(channel))

    async def submit(self, new: NewTask) -> Submitted:
        """See TaskPort.submit."""
        request = pb.SubmitTaskRequest(spec=new.spec, idempotency_key=new.idempotency_key)
        answer = await _told(
            self._stub.SubmitTask(request, timeout=self._timeout_seconds, metadata=_metadata(new.tenant))
        )
        return Submitted(task=task_of(answer.task), existed=answer.existed)

    async def get(self, tenant: str, task_id: str) -> Task:
        """See TaskPort.get."""
        return (await self.details(tenant, task_id)).task

    async def details(self, tenant: str, task_id: str) -> TaskDetails:
        """See TaskPort.details."""
        request = pb.GetTaskRequest(id=task_id)
        answer = await _told(self._stub.GetTask(request, timeout=self._timeout_seconds, metadata=_metadata(tenant)))
        return TaskDetails(
            task=task_of(answer.task), spec=answer.spec, attempts=[*map(attempt_of_message, answer.attempts)]
        )

    async def list_page(self, tenant: str, query: TaskQuery) -> TaskPage:
        """See TaskPort.list_page."""
        request = pb.ListTasksRequest(
            states=[state.value for state in sorted(query.states)],  # type: ignore[misc]  # same numbers
            model=query.model,
            batch=query.batch,
            page_size=query.page_size,
            page_token=query.page_token,
        )
        answer = await _told(self._stub.ListTasks(request, timeout=self._timeout_seconds, metadata=_metadata(tenant)))
        return TaskPage(
            tasks=[*map(task_of, answer.tasks)], next_page_token=answer.next_page_token, notice=answer.notice
        )

    async def cancel(self, tenant: str, task_id: str) -> Task:
        """See TaskPort.cancel."""
        request = pb.CancelTaskRequest(id=task_id)
        answer = await _told(self._stub.CancelTask(request, timeout=self._timeout_seconds, metadata=_metadata(tenant)))
        return task_of(answer.task)

    async def delete(self, tenant: str, task_id: str) -> None:
        """See TaskPort.delete."""
        request = pb.DeleteTaskRequest(id=task_id)
        await _told(self._stub.DeleteTask(request, timeout=self._timeout_seconds, metadata=_metadata(tenant)))

    async def watch(self, tenant: str, task_id: str, after_event: int = 0) -> AsyncGenerator[TaskEvent]:
        """See TaskPort.watch. Leaving the iterator ends the watch, not the task."""
        request = pb.WatchTaskRequest(id=task_id, after_event=after_event)
        call = self._stub.WatchTask(request, metadata=_metadata(tenant))
        try:
            async for response in call:
                news = event_of(response)
                if news is not None:
                    yield news
        except grpc.aio.AioRpcError as error:
            raise _meaning(error) from error
        finally:
            call.cancel()


def _metadata(tenant: str) -> tuple[tuple[str, str], ...]:
    return ((TENANT, tenant),)


async def _told(call: Awaitable[AnswerT]) -> AnswerT:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise _meaning(error) from error


def _meaning(error: grpc.aio.AioRpcError) -> WeftError:
    """The error of a failed call: a router that is slow or stopping counts as unreachable."""
    found = error_from_call(error, Reason.SERVICE_UNAVAILABLE)
    if found.reason in {Reason.DEADLINE_EXCEEDED, Reason.CANCELLED}:
        return WeftError(Reason.SERVICE_UNAVAILABLE, "task store timed out", retry_after_seconds=1)
    return found
