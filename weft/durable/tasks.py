"""The client of the task store, and helpers for task messages.

A task is executed at least once and has exactly one terminal state. Every method takes the tenant and raises NOT_FOUND
for another tenant's task, and SERVICE_UNAVAILABLE if the store is unreachable. The records are messages of `router.v1`;
returned messages may be shared, so change only a copy.
"""

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

from weft.api.common.v1 import audio_pb2, chat_pb2, completion_pb2, embedding_pb2, error_reason_pb2, image_pb2
from weft.api.router.v1 import task_pb2, task_service_pb2_grpc
from weft.api.router.v1 import task_service_pb2 as pb
from weft.durable.store_calls import TIMEOUT_SECONDS, StoreTimeoutError, store_calls
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason, reason_of

TASK_PREFIX = "task"
TASK_STATES = frozenset(task_pb2.TaskState.values()) - {task_pb2.TASK_STATE_UNSPECIFIED}
MAX_IDEMPOTENCY_KEY_CHARS = 255
MAX_ORIGIN_KIND_CHARS = 64
MAX_LISTED = 1_000
DEFAULT_LISTED = 100
_INDEX_BITS = 32
_STATE_PREFIX = "TASK_STATE_"

TaskPayload = (
    chat_pb2.ChatPayload
    | completion_pb2.CompletionPayload
    | embedding_pb2.EmbeddingPayload
    | image_pb2.ImagePayload
    | audio_pb2.TranscriptionPayload
    | audio_pb2.SpeechPayload
)


class TaskClient:
    """Client of the task store and its execution."""

    def __init__(self, store: Any, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        """`store`: a channel to the router, or its servicer in this process."""
        self._calls = store_calls(store, task_service_pb2_grpc.TaskServiceStub, "task store", timeout_seconds)

    async def submit(
        self, tenant: str, request: pb.SubmitTaskRequest, *, caller: str = "local"
    ) -> pb.SubmitTaskResponse:
        """Submits a task; returns once it is durable. `caller`: for the log; see `RequestContext.caller`.

        Raises INVALID_ARGUMENT naming the field, REQUEST_TOO_LARGE, IDEMPOTENCY_CONFLICT, TOO_MANY_RESOURCES at the
        tenant's limit.
        """
        request.requested_by = caller
        try:
            answer: pb.SubmitTaskResponse = await self._calls.ask("SubmitTask", request, tenant)
        except StoreTimeoutError as error:
            if not request.idempotency_key:
                error.message += "; it may have stored the task: look for it in the list of tasks before you repeat it"
            raise
        require_known_states([answer.task])
        return answer

    async def get(self, tenant: str, task_id: str) -> task_pb2.Task:
        """Returns one task. Raises NOT_FOUND."""
        return copy_of((await self.details(tenant, task_id)).task)

    async def details(self, tenant: str, task_id: str) -> pb.GetTaskResponse:
        """Returns a task with its spec and attempts. Raises NOT_FOUND."""
        answer: pb.GetTaskResponse = await self._calls.ask("GetTask", pb.GetTaskRequest(id=task_id), tenant)
        require_known_states([answer.task])
        return answer

    async def list_page(self, tenant: str, request: pb.ListTasksRequest) -> pb.ListTasksResponse:
        """Returns a page of tasks, newest first. Raises INVALID_ARGUMENT naming the field."""
        answer: pb.ListTasksResponse = await self._calls.ask("ListTasks", request, tenant)
        require_known_states(answer.tasks)
        return answer

    async def cancel(self, tenant: str, task_id: str) -> task_pb2.Task:
        """Cancels the task and its running attempt; a finished task is unchanged. Raises NOT_FOUND."""
        answer: pb.CancelTaskResponse = await self._calls.ask("CancelTask", pb.CancelTaskRequest(id=task_id), tenant)
        require_known_states([answer.task])
        return answer.task

    async def delete(self, tenant: str, task_id: str) -> None:
        """Deletes a finished task. Raises NOT_FOUND, RESOURCE_IN_USE."""
        await self._calls.ask("DeleteTask", pb.DeleteTaskRequest(id=task_id), tenant)

    async def watch(self, tenant: str, task_id: str, after_event: int = 0) -> AsyncGenerator[pb.WatchTaskResponse]:
        """Yields the task, every piece after an event, and the task at each change; ends with the finished task.

        An event of a lost attempt counts as none. Raises NOT_FOUND, and TOO_MANY_RESOURCES at the limit of watches.
        """
        request = pb.WatchTaskRequest(id=task_id, after_event=after_event)
        async with aclosing(self._calls.read("WatchTask", request, tenant, is_timed=False)) as messages:
            async for message in messages:
                if message.HasField("task"):
                    require_known_states([message.task])
                # Otherwise it is of an unknown kind.
                if message.WhichOneof("news") is not None:
                    yield message

    async def watch_all(self, tenant: str, past_count: int = 0) -> AsyncGenerator[pb.WatchTasksResponse]:
        """Yields a tenant's newest tasks, oldest first, `synced`, then each new or changed task, without end.

        Deletions are reported by id. `past_count`: 0 means 100, more than 1,000 means 1,000. Raises TOO_MANY_RESOURCES
        as `watch`.
        """
        request = pb.WatchTasksRequest(past_count=past_count)
        async with aclosing(self._calls.read("WatchTasks", request, tenant, is_timed=False)) as messages:
            async for message in messages:
                if message.HasField("task"):
                    require_known_states([message.task])
                yield message


def require_known_states(tasks: Iterable[task_pb2.Task]) -> None:
    """Raises INTERNAL for a task with a state that this release does not know."""
    if not all(task.state in TASK_STATES for task in tasks):
        raise WeftError(Reason.INTERNAL, "the router is of a newer release, whose tasks this one cannot read")


def is_terminal(task: task_pb2.Task) -> bool:
    """Whether the state of the task is final."""
    return task.state >= task_pb2.TASK_STATE_COMPLETED


def copy_of(task: task_pb2.Task, **changed: str) -> task_pb2.Task:
    """Returns a changed copy of a task, which does not keep the message alive that contains the task."""
    copy = task_pb2.Task()
    copy.CopyFrom(task)
    for name, value in changed.items():
        setattr(copy, name, value)
    return copy


def state_name(state: "task_pb2.TaskState.ValueType") -> str:
    """Returns the name of a state without the enum prefix, such as COMPLETED."""
    return task_pb2.TaskState.Name(state).removeprefix(_STATE_PREFIX)


def task_error(reason: Reason, message: str) -> task_pb2.TaskError:
    """Returns the failure of a task or attempt; characters that a message cannot hold are replaced."""
    text = message.encode("utf-8", "replace").decode()
    return task_pb2.TaskError(reason=error_reason_pb2.ErrorReason.ValueType(reason), message=text)


def failure_of(task: task_pb2.Task) -> WeftError | None:
    """Returns the error of a failed task; None: it has none."""
    return WeftError(reason_of(task.error.reason), task.error.message) if task.HasField("error") else None


def task_not_found(task_id: str) -> WeftError:
    """Returns NOT_FOUND for a task that is unknown or another tenant's."""
    return WeftError(Reason.NOT_FOUND, f"there is no task {task_id}; finished tasks are deleted after a retention time")


def event_number(attempt: int, index: int) -> int:
    """Returns the number of an attempt's event (counted from 1). Numbers increase across attempts."""
    return (attempt << _INDEX_BITS) | index


def attempt_of(number: int) -> int:
    """Returns the attempt of an event."""
    return number >> _INDEX_BITS


def index_of(number: int) -> int:
    """Returns the index of an event in its attempt, counted from 1."""
    return number & ((1 << _INDEX_BITS) - 1)


def payload_of(spec: task_pb2.TaskSpec) -> TaskPayload | None:
    """Returns the payload of a spec; None: unknown kind."""
    kind = spec.WhichOneof("payload")
    return None if kind is None else getattr(spec, kind)
