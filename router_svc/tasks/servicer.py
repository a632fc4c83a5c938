"""TaskService over the port. Translation only."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc

from router_svc.callers import metadata_of, tenant_of
from weft.api.router.v1 import task_service_pb2 as pb
from weft.api.router.v1 import task_service_pb2_grpc
from weft.durable.task_messages import attempt_message, event_message, task_message
from weft.durable.tasks import DEFAULT_LISTED, NewTask, TaskPort, TaskQuery, TaskState
from weft.kernel.errors import invalid_field
from weft.kernel.names import MAX_REQUEST_ID_CHARS, require_token
from weft.kernel.principal import MAY_LEAVE
from weft.kernel.rpc import answering
from weft.kernel.rpc_auth import caller
from weft.kernel.telemetry import TRACEPARENT, valid_traceparent

Context = grpc.aio.ServicerContext[Any, Any]


class TaskServicer(task_service_pb2_grpc.TaskServiceServicer):
    """See TaskService."""

    def __init__(self, tasks: TaskPort) -> None:
        self._tasks = tasks

    async def SubmitTask(  # noqa: N802 - the rpc's name
        self, request: pb.SubmitTaskRequest, context: Context
    ) -> pb.SubmitTaskResponse:
        """See TaskService.SubmitTask."""
        async with answering(context):
            metadata = metadata_of(context)
            spec = request.spec
            if spec.options.allow_remote:
                caller().require(MAY_LEAVE)
            # A task with a key must be the same each time that it is sent: a trace of its own would make it another.
            if not spec.traceparent and not request.idempotency_key:
                spec.traceparent = valid_traceparent(metadata.get(TRACEPARENT)) or ""
            submitted = await self._tasks.submit(
                NewTask(
                    tenant=tenant_of(metadata),
                    spec=spec,
                    idempotency_key=request.idempotency_key,
                    caller=caller().name,
                )
            )
            return pb.SubmitTaskResponse(task=task_message(submitted.task), existed=submitted.existed)
        raise AssertionError("abort has raised")

    async def GetTask(self, request: pb.GetTaskRequest, context: Context) -> pb.GetTaskResponse:  # noqa: N802
        """See TaskService.GetTask."""
        async with answering(context):
            found = await self._tasks.details(_tenant(context), _id(request.id))
            return pb.GetTaskResponse(
                task=task_message(found.task), spec=found.spec, attempts=map(attempt_message, found.attempts)
            )
        raise AssertionError("abort has raised")

    async def ListTasks(self, request: pb.ListTasksRequest, context: Context) -> pb.ListTasksResponse:  # noqa: N802
        """See TaskService.ListTasks."""
        async with answering(context):
            query = TaskQuery(
                states=frozenset(_state(number) for number in request.states),
                model=request.model,
                batch=request.batch,
                page_size=request.page_size or DEFAULT_LISTED,
                page_token=request.page_token,
            )
            page = await self._tasks.list_page(_tenant(context), query)
            return pb.ListTasksResponse(
                tasks=map(task_message, page.tasks), next_page_token=page.next_page_token, notice=page.notice
            )
        raise AssertionError("abort has raised")

    async def CancelTask(self, request: pb.CancelTaskRequest, context: Context) -> pb.CancelTaskResponse:  # noqa: N802
        """See TaskService.CancelTask."""
        async with answering(context):
            task = await self._tasks.cancel(_tenant(context), _id(request.id))
            return pb.CancelTaskResponse(task=task_message(task))
        raise AssertionError("abort has raised")

    async def WatchTask(  # noqa: N802 - the rpc's name
        self, request: pb.WatchTaskRequest, context: Context
    ) -> AsyncGenerator[pb.WatchTaskResponse]:
        """See TaskService.WatchTask."""
        async with answering(context):
            if request.after_event < 0:
                raise invalid_field("after_event", "must not be negative")
            watched = self._tasks.watch(_tenant(context), _id(request.id), request.after_event)
            async with aclosing(watched) as news:
                async for each in news:
                    yield event_message(each)

    async def DeleteTask(self, request: pb.DeleteTaskRequest, context: Context) -> pb.DeleteTaskResponse:  # noqa: N802
        """See TaskService.DeleteTask."""
        async with answering(context):
            await self._tasks.delete(_tenant(context), _id(request.id))
            return pb.DeleteTaskResponse()
        raise AssertionError("abort has raised")


def _tenant(context: Context) -> str:
    return tenant_of(metadata_of(context))


def _id(text: str) -> str:
    return require_token(text, "id", MAX_REQUEST_ID_CHARS)


def _state(number: int) -> TaskState:
    try:
        return TaskState(number)
    except ValueError:
        raise invalid_field("states", "must be states of tasks") from None
