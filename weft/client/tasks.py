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

from weft.api.router.v1 import file_service_pb2, file_service_pb2_grpc, task_pb2, task_service_pb2_grpc
from weft.api.router.v1 import task_service_pb2 as pb
from weft.client._channel import ServiceClient
from weft.client._home import mesh_address
from weft.client._messages import ChatOptions, Message, chat_request
from weft.kernel.errors.error_tree import invalid_field

CALL_TIMEOUT_SECONDS = 10.0
MAX_PAGE = 1_000
_ENDED = frozenset({task_pb2.TASK_STATE_COMPLETED, task_pb2.TASK_STATE_FAILED, task_pb2.TASK_STATE_CANCELLED})
_STATES = {name.removeprefix("TASK_STATE_").lower(): value for name, value in task_pb2.TaskState.items() if value}


class Tasks(ServiceClient):
    """Calls on one router. Every failure is a WeftError with a reason."""

    def __init__(self, target: str, timeout_seconds: float | None = None) -> None:
        """`timeout_seconds` of a call; None: CALL_TIMEOUT_SECONDS."""
        super().__init__(target, CALL_TIMEOUT_SECONDS if timeout_seconds is None else timeout_seconds)
        self._stub = task_service_pb2_grpc.TaskServiceStub(self._channel)
        self._files = file_service_pb2_grpc.FileServiceStub(self._channel)

    def submit(self, spec: task_pb2.TaskSpec, *, idempotency_key: str = "") -> task_pb2.Task:
        """Submits a task, which is durable when this returns. Submitting again with the same key returns the same task.

        Images and recordings are inline or ids of files. Raises INVALID_ARGUMENT naming the field, REQUEST_TOO_LARGE,
        TOO_MANY_RESOURCES if the mesh's storage limit is reached, MODEL_NOT_FOUND.
        """
        task: task_pb2.Task = self._call(
            self._stub.SubmitTask, pb.SubmitTaskRequest(spec=spec, idempotency_key=idempotency_key)
        ).task
        return task

    def read_file(self, file_id: str) -> Iterator[bytes]:
        """Yields the content of a file that an answer refers to, an image or recording. Raises NOT_FOUND."""
        request = file_service_pb2.ReadFileRequest(id=file_id)
        for response in self._stream(self._files.ReadFile(request)):
            yield response.data

    def submit_chat(
        self,
        model: str,
        messages: str | Iterable[Message],
        *,
        idempotency_key: str = "",
        wait_for_model: bool = False,
        **options: Unpack[ChatOptions],
    ) -> task_pb2.Task:
        """Submits a chat like `submit`.

        `wait_for_model`: wait for a model that does not exist yet, instead of raising MODEL_NOT_FOUND.
        """
        chat = chat_request(model, messages, options)
        spec = task_pb2.TaskSpec(model=model, chat=chat.payload, options=chat.options, wait_for_model=wait_for_model)
        return self.submit(spec, idempotency_key=idempotency_key)

    def get(self, task_id: str) -> pb.GetTaskResponse:
        """Returns a task with its attempts and its request. Raises NOT_FOUND."""
        found: pb.GetTaskResponse = self._call(self._stub.GetTask, pb.GetTaskRequest(id=task_id))
        return found

    def newest(
        self, limit: int, *, states: Iterable[str] = (), model: str = "", batch: str = "", caller: str = ""
    ) -> pb.ListTasksResponse:
        """Returns the newest tasks that match all filters; empty filters match any. Raises INVALID_ARGUMENT."""
        numbers = [_state(word) for word in states]
        listed = pb.ListTasksResponse()
        while len(listed.tasks) < limit:
            request = pb.ListTasksRequest(
                states=numbers,
                model=model,
                batch=batch,
                caller=caller,
                page_size=min(limit - len(listed.tasks), MAX_PAGE),
                page_token=listed.next_page_token,
            )
            found = self._call(self._stub.ListTasks, request)
            listed.tasks.extend(found.tasks)
            listed.next_page_token, listed.notice = found.next_page_token, found.notice
            if not listed.next_page_token:
                break
        return listed

    def cancel(self, task_id: str) -> task_pb2.Task:
        """Cancels a task and its running backend request. Returns the ended task. Raises NOT_FOUND."""
        task: task_pb2.Task = self._call(self._stub.CancelTask, pb.CancelTaskRequest(id=task_id)).task
        return task

    def delete(self, task_id: str) -> None:
        """Deletes a finished task. Raises NOT_FOUND, RESOURCE_IN_USE for an unfinished one."""
        self._call(self._stub.DeleteTask, pb.DeleteTaskRequest(id=task_id))

    def watch(
        self, task_id: str, after_event: int = 0, *, timeout_seconds: float | None = None
    ) -> Iterator[task_pb2.Task | task_pb2.TaskPiece]:
        """Yields the task, every chunk of its answer, and the task after each change, last in its final state."""
        request = pb.WatchTaskRequest(id=task_id, after_event=after_event)
        for response in self._stream(self._stub.WatchTask(request, timeout=timeout_seconds)):
            yield response.task if response.HasField("task") else response.piece


def connect_tasks(
    target: str | None = None, *, home: Path | str | None = None, timeout_seconds: float | None = None
) -> Tasks:
    """Connects to the router at a gRPC target, or of the mesh that runs on `home`.

    Raises SERVICE_UNAVAILABLE when none runs.
    """
    return Tasks(target or mesh_address(home), timeout_seconds)


def has_ended(task: task_pb2.Task) -> bool:
    """Whether a task is completed, failed or cancelled."""
    return task.state in _ENDED


def text_of(piece: task_pb2.TaskPiece) -> str:
    """Returns the text of a chunk, from the first choice or a transcription."""
    return "".join(
        event.transcript.text if event.HasField("transcript") else event.delta.text
        for event in piece.output.events
        if event.HasField("transcript") or (event.HasField("delta") and event.delta.index == 0)
    )


def _state(word: str) -> "task_pb2.TaskState.ValueType":
    number = _STATES.get(word)
    if number is None:
        raise invalid_field("state", f"must be one of {', '.join(_STATES)}")
    return number
