"""A synchronous client of durable tasks.

from weft.client.tasks import connect_tasks

with connect_tasks() as tasks:
    task = tasks.submit_chat("smollm2-135m", "Why is the sky blue?")
    for piece in tasks.watch(task.id):
        print(piece)
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Unpack

from weft.api.common.v1 import event_pb2
from weft.api.router.v1 import task_pb2, task_service_pb2_grpc
from weft.api.router.v1 import task_service_pb2 as pb
from weft.client._channel import ServiceClient, mesh_address
from weft.client._messages import ChatOptions, Message, chat_request
from weft.documents.task_documents import TaskDocument, TaskList, task_details, task_document
from weft.kernel.errors import invalid_field

CALL_TIMEOUT_SECONDS = 10.0
MAX_PAGE = 1_000
_STATES = {name.removeprefix("TASK_STATE_").lower(): value for name, value in task_pb2.TaskState.items() if value}


def connect_tasks(
    target: str | None = None, *, home: Path | str | None = None, timeout_seconds: float = CALL_TIMEOUT_SECONDS
) -> "Tasks":
    """Connects to the router at a gRPC target, or of the mesh that runs on `home`.

    Raises SERVICE_UNAVAILABLE when none runs.
    """
    return Tasks(target or mesh_address(home), timeout_seconds)


class Tasks(ServiceClient):
    """Calls on one router. Every failure is a WeftError with a reason."""

    def __init__(self, target: str, timeout_seconds: float = CALL_TIMEOUT_SECONDS) -> None:
        super().__init__(target, timeout_seconds)
        self._stub = task_service_pb2_grpc.TaskServiceStub(self._channel)

    def submit_chat(
        self,
        model: str,
        messages: str | Iterable[Message],
        *,
        idempotency_key: str = "",
        wait_for_model: bool = False,
        **options: Unpack[ChatOptions],
    ) -> TaskDocument:
        """Submits a chat; once this returns it is durable. Sent again with the same key it is the same task.

        `wait_for_model`: whether to wait for a model that does not exist yet. Raises MODEL_NOT_FOUND otherwise.
        """
        chat = chat_request(model, messages, options)
        spec = task_pb2.TaskSpec(model=model, chat=chat.payload, options=chat.options, wait_for_model=wait_for_model)
        request = pb.SubmitTaskRequest(spec=spec, idempotency_key=idempotency_key)
        return task_document(self._call(self._stub.SubmitTask, request).task)

    def get(self, task_id: str) -> TaskDocument:
        """Returns one task with its attempts. Raises NOT_FOUND."""
        return task_details(self._call(self._stub.GetTask, pb.GetTaskRequest(id=task_id)))

    def spec(self, task_id: str) -> task_pb2.TaskSpec:
        """Returns the submitted request. Raises NOT_FOUND."""
        spec: task_pb2.TaskSpec = self._call(self._stub.GetTask, pb.GetTaskRequest(id=task_id)).spec
        return spec

    def newest(self, limit: int, *, states: Iterable[str] = (), model: str = "", batch: str = "") -> TaskList:
        """The newest tasks of some states (none: all), model and batch (empty: any). Raises INVALID_ARGUMENT."""
        numbers = [_state(word) for word in states]
        items: list[TaskDocument] = []
        token = notice = ""
        while len(items) < limit:
            request = pb.ListTasksRequest(
                states=numbers,
                model=model,
                batch=batch,
                page_size=min(limit - len(items), MAX_PAGE),
                page_token=token,
            )
            found = self._call(self._stub.ListTasks, request)
            items += map(task_document, found.tasks)
            token, notice = found.next_page_token, found.notice
            if not token:
                break
        return TaskList(kind="TaskList", items=tuple(items), notice=notice or None)

    def cancel(self, task_id: str) -> TaskDocument:
        """Cancels a task and its running backend request; returns it when it has ended. Raises NOT_FOUND."""
        return task_document(self._call(self._stub.CancelTask, pb.CancelTaskRequest(id=task_id)).task)

    def delete(self, task_id: str) -> None:
        """Deletes a finished task. Raises NOT_FOUND, RESOURCE_IN_USE for an unfinished one."""
        self._call(self._stub.DeleteTask, pb.DeleteTaskRequest(id=task_id))

    def watch(
        self, task_id: str, after_event: int = 0, *, timeout_seconds: float | None = None
    ) -> Iterator[TaskDocument | task_pb2.TaskPiece]:
        """Yields the task, every chunk of its answer, and the task at each change; its final state comes last."""
        request = pb.WatchTaskRequest(id=task_id, after_event=after_event)
        for response in self._stream(self._stub.WatchTask(request, timeout=timeout_seconds)):
            yield task_document(response.task) if response.HasField("task") else response.piece


def text_of(piece: task_pb2.TaskPiece) -> str:
    """Returns the text of a chunk, of the first choice."""
    return "".join(event.delta.text for event in piece.output.events if _is_first(event))


def _is_first(event: event_pb2.InferenceEvent) -> bool:
    return event.HasField("delta") and event.delta.index == 0


def _state(word: str) -> "task_pb2.TaskState.ValueType":
    number = _STATES.get(word)
    if number is None:
        raise invalid_field("state", f"must be one of {', '.join(_STATES)}")
    return number
