"""The file, response and task stores over gRPC, and the calls that they share.

A store that is slow or stopping counts as unreachable: SERVICE_UNAVAILABLE.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager
from datetime import UTC
from typing import TYPE_CHECKING, Any, TypeVar, cast

import grpc
from typing_extensions import override

from weft.api.router.v1 import (
    file_service_pb2,
    file_service_pb2_grpc,
    stored_response_service_pb2,
    stored_response_service_pb2_grpc,
    task_service_pb2,
    task_service_pb2_grpc,
)
from weft.durable.batches import MAX_PIECE_BYTES, FilePage, FilePort, NewFile, StoredFile
from weft.durable.responses import ResponseStore, StoredResponse
from weft.durable.tasks import (
    NewTask,
    Submitted,
    Task,
    TaskDetails,
    TaskEvent,
    TaskPage,
    TaskPort,
    TaskQuery,
    attempt_of_message,
    event_of,
    task_of,
)
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.rpc import error_from_call

if TYPE_CHECKING:
    from weft.api.router.v1.file_service_pb2_grpc import FileServiceAsyncStub
    from weft.api.router.v1.stored_response_service_pb2_grpc import StoredResponseServiceAsyncStub
    from weft.api.router.v1.task_service_pb2_grpc import TaskServiceAsyncStub


TIMEOUT_SECONDS = 10.0
"""Timeout of an answer, and of the next message of a stream."""
WRITE_TIMEOUT_SECONDS = 60.0
"""Minimum timeout of a chunk of an upload: the store first writes the previous ones, on a disk that may be slow."""
COMMIT_TIMEOUT_SECONDS = 600.0
"""Minimum timeout of the final answer of an upload: after a timeout the outcome is unknown. A store that is gone is
noticed long before, by its channel."""
TENANT = "x-tenant-id"
_WRITE_FAILED = "Internal error from Core"
"""Details of a call in grpc.aio after a failed write."""

ResultT = TypeVar("ResultT")


def as_tenant(tenant: str) -> tuple[tuple[str, str], ...]:
    """Metadata of a call for a tenant."""
    return ((TENANT, tenant),)


async def answered(call: Awaitable[ResultT], *, kind: str) -> ResultT:
    """Returns the response of a call with a deadline."""
    with _explained(kind):
        return await call


async def upload(
    call: "grpc.aio.StreamUnaryCall[Any, ResultT]",
    messages: AsyncIterator[object],
    *,
    kind: str,
    timeout_seconds: float,
) -> ResultT:
    """Sends all messages with back-pressure and returns the answer.

    Raises the errors of `messages`; the store then sees a cancelled call and stores nothing.
    """
    first_status = _FirstStatus(call)
    try:
        async for message in messages:
            with _explained(kind, first_status):
                if not await _write(call, message, max(timeout_seconds, WRITE_TIMEOUT_SECONDS)):
                    break
        with _explained(kind, first_status):
            async with asyncio.timeout(max(timeout_seconds, COMMIT_TIMEOUT_SECONDS)):
                if not call.done():
                    await call.done_writing()
                return await call
    finally:
        # Cancelling a finished call has no effect.
        call.cancel()


async def read_stream(
    call: "grpc.aio.UnaryStreamCall[Any, ResultT]", *, kind: str, timeout_seconds: float
) -> AsyncGenerator[ResultT]:
    """Yields every message of a call."""
    try:
        while True:
            with _explained(kind):
                async with asyncio.timeout(timeout_seconds):
                    message = await call.read()
            if message is grpc.aio.EOF:
                return
            yield cast("ResultT", message)
    finally:
        call.cancel()


async def _write(call: "grpc.aio.StreamUnaryCall[Any, Any]", message: object, timeout_seconds: float) -> bool:
    """Writes one message. False: the call has ended, and its answer has the reason."""
    try:
        async with asyncio.timeout(timeout_seconds):
            await call.write(message)
    except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
        # A failed write does not have the reason: the status comes with the answer.
        return False
    return True


class _FirstStatus:
    """The first status of a call, even if a write is in flight at that moment.

    The write then fails, and grpc.aio (1.85) replaces the status that has just arrived by that failure.
    """

    def __init__(self, call: "grpc.aio.StreamUnaryCall[Any, Any]") -> None:
        self._first: grpc.aio.AioRpcError | None = None
        call.add_done_callback(self._note)

    def instead_of(self, error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
        """Returns the error with the call's status, where `error` may only report a failed write."""
        return error if self._first is None or error.details() != _WRITE_FAILED else self._first

    def _note(self, call: Any) -> None:
        # The status of a finished call is available at once, though its accessors are coroutines.
        code, details, trailer = (_at_once(each) for each in (call.code(), call.details(), call.trailing_metadata()))
        if self._first is None and details != _WRITE_FAILED:
            self._first = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailer, details)


def _at_once(answer: Coroutine[Any, Any, Any]) -> Any:
    try:
        answer.send(None)
    except StopIteration as done:
        return done.value
    answer.close()
    raise AssertionError("the call is over")


@contextmanager
def _explained(kind: str, first_status: _FirstStatus | None = None) -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        why = error if first_status is None else first_status.instead_of(error)
        found = error_from_call(why, Reason.SERVICE_UNAVAILABLE)
        if found.reason in {Reason.DEADLINE_EXCEEDED, Reason.CANCELLED}:
            found = _silent(kind)
        raise found from error
    except TimeoutError as error:
        raise _silent(kind) from error


def _silent(kind: str) -> WeftError:
    return WeftError(Reason.SERVICE_UNAVAILABLE, f"the store of {kind} timed out")


_KIND = "files"


class RemoteFiles(FilePort):
    """A FilePort whose store is behind a channel."""

    def __init__(self, channel: grpc.aio.Channel, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._timeout_seconds = timeout_seconds
        self._stub = cast("FileServiceAsyncStub", file_service_pb2_grpc.FileServiceStub(channel))

    @override
    async def save(self, new: NewFile, content: AsyncIterator[bytes]) -> StoredFile:
        call: Any = self._stub.UploadFile(metadata=as_tenant(new.tenant))
        async with aclosing(_messages(new, content)) as messages:
            done = await upload(call, messages, kind=_KIND, timeout_seconds=self._timeout_seconds)
        return file_of(done.file)

    @override
    async def get(self, tenant: str, file_id: str) -> StoredFile:
        found = await self._ask(self._stub.GetFile, tenant, file_service_pb2.GetFileRequest(id=file_id))
        return file_of(found.file)

    @override
    async def list_page(self, tenant: str, *, purpose: str = "", after: str = "", limit: int = 100) -> FilePage:
        request = file_service_pb2.ListFilesRequest(purpose=purpose, after=after, limit=limit)
        found = await self._ask(self._stub.ListFiles, tenant, request)
        return FilePage(files=[file_of(message) for message in found.files], has_more=found.has_more)

    @override
    async def read(self, tenant: str, file_id: str) -> AsyncGenerator[bytes]:
        call: Any = self._stub.ReadFile(file_service_pb2.ReadFileRequest(id=file_id), metadata=as_tenant(tenant))
        async with aclosing(read_stream(call, kind=_KIND, timeout_seconds=self._timeout_seconds)) as messages:
            async for message in messages:
                yield message.data

    @override
    async def delete(self, tenant: str, file_id: str) -> None:
        await self._ask(self._stub.DeleteFile, tenant, file_service_pb2.DeleteFileRequest(id=file_id))

    async def _ask(self, method: Any, tenant: str, request: object) -> Any:
        call = method(request, metadata=as_tenant(tenant), timeout=self._timeout_seconds)
        return await answered(call, kind=_KIND)


async def _messages(new: NewFile, content: AsyncIterator[bytes]) -> AsyncGenerator[file_service_pb2.UploadFileRequest]:
    yield file_service_pb2.UploadFileRequest(file=file_service_pb2.File(name=new.name, purpose=new.purpose))
    size = 0
    async for data in content:
        for start in range(0, len(data), MAX_PIECE_BYTES):
            yield file_service_pb2.UploadFileRequest(data=data[start : start + MAX_PIECE_BYTES])
        size += len(data)
    yield file_service_pb2.UploadFileRequest(file=file_service_pb2.File(byte_count=size))


def file_message(file: StoredFile) -> file_service_pb2.File:
    """Converts a file to its message."""
    message = file_service_pb2.File(
        id=file.id, tenant=file.tenant, name=file.name, purpose=file.purpose, byte_count=file.size
    )
    message.create_time.FromDatetime(file.created_at)
    message.expire_time.FromDatetime(file.expires_at)
    return message


def file_of(message: file_service_pb2.File) -> StoredFile:
    """Converts a message to a file."""
    return StoredFile(
        id=message.id,
        tenant=message.tenant,
        name=message.name,
        purpose=message.purpose,
        size=message.byte_count,
        created_at=message.create_time.ToDatetime(UTC),
        expires_at=message.expire_time.ToDatetime(UTC),
    )


class RemoteResponses(ResponseStore):
    """A ResponseStore behind a channel."""

    def __init__(self, channel: grpc.aio.Channel, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._timeout_seconds = timeout_seconds
        stub = stored_response_service_pb2_grpc.StoredResponseServiceStub(channel)
        self._stub = cast("StoredResponseServiceAsyncStub", stub)

    @override
    async def save(self, response: StoredResponse) -> None:
        try:
            await self._stub.SaveResponse(
                stored_response_service_pb2.SaveResponseRequest(response=response_message(response)),
                timeout=self._timeout_seconds,
            )
        except grpc.aio.AioRpcError as error:
            raise _call_error(error) from error

    @override
    async def get(self, tenant: str, response_id: str) -> StoredResponse:
        try:
            found = await self._stub.GetResponse(
                stored_response_service_pb2.GetResponseRequest(tenant=tenant, id=response_id),
                timeout=self._timeout_seconds,
            )
        except grpc.aio.AioRpcError as error:
            raise _call_error(error) from error
        return response_of(found.response)

    @override
    async def chain(self, tenant: str, response_id: str) -> Sequence[StoredResponse]:
        try:
            found = await self._stub.ListChain(
                stored_response_service_pb2.ListChainRequest(tenant=tenant, id=response_id),
                timeout=self._timeout_seconds,
            )
        except grpc.aio.AioRpcError as error:
            raise _call_error(error) from error
        return [response_of(message) for message in found.responses]

    @override
    async def delete(self, tenant: str, response_id: str) -> None:
        try:
            await self._stub.DeleteResponse(
                stored_response_service_pb2.DeleteResponseRequest(tenant=tenant, id=response_id),
                timeout=self._timeout_seconds,
            )
        except grpc.aio.AioRpcError as error:
            raise _call_error(error) from error


def _call_error(error: grpc.aio.AioRpcError) -> WeftError:
    """The error of a failed call: a store that is slow or stopping counts as unreachable."""
    found = error_from_call(error, Reason.SERVICE_UNAVAILABLE)
    if found.reason in {Reason.DEADLINE_EXCEEDED, Reason.CANCELLED}:
        return WeftError(Reason.SERVICE_UNAVAILABLE, "response store timed out")
    return found


def response_message(response: StoredResponse) -> stored_response_service_pb2.StoredResponse:
    """Converts a stored response to its message."""
    message = stored_response_service_pb2.StoredResponse(
        id=response.id,
        tenant=response.tenant,
        previous_id=response.previous_id,
        body=response.body,
        items=response.items,
    )
    message.create_time.FromDatetime(response.created_at)
    return message


def response_of(message: stored_response_service_pb2.StoredResponse) -> StoredResponse:
    """An answer as it came."""
    return StoredResponse(
        id=message.id,
        tenant=message.tenant,
        previous_id=message.previous_id,
        created_at=message.create_time.ToDatetime(UTC),
        body=message.body,
        items=message.items,
    )


TASK_TIMEOUT_SECONDS = 30.0
"""Timeout of every call but watch. A router whose database is locked answers within it."""

AnswerT = TypeVar("AnswerT")


class RemoteTasks(TaskPort):
    """A TaskPort over gRPC. The tenant is sent as metadata: the caller must be trusted with it."""

    def __init__(self, channel: grpc.aio.Channel, *, timeout_seconds: float = TASK_TIMEOUT_SECONDS) -> None:
        self._timeout_seconds = timeout_seconds
        self._stub = cast("TaskServiceAsyncStub", task_service_pb2_grpc.TaskServiceStub(channel))

    @override
    async def submit(self, new: NewTask) -> Submitted:
        request = task_service_pb2.SubmitTaskRequest(spec=new.spec, idempotency_key=new.idempotency_key)
        answer = await _answer_of(
            self._stub.SubmitTask(request, timeout=self._timeout_seconds, metadata=as_tenant(new.tenant))
        )
        return Submitted(task=task_of(answer.task), existed=answer.existed)

    @override
    async def get(self, tenant: str, task_id: str) -> Task:
        return (await self.details(tenant, task_id)).task

    @override
    async def details(self, tenant: str, task_id: str) -> TaskDetails:
        request = task_service_pb2.GetTaskRequest(id=task_id)
        answer = await _answer_of(
            self._stub.GetTask(request, timeout=self._timeout_seconds, metadata=as_tenant(tenant))
        )
        return TaskDetails(
            task=task_of(answer.task), spec=answer.spec, attempts=[*map(attempt_of_message, answer.attempts)]
        )

    @override
    async def list_page(self, tenant: str, query: TaskQuery) -> TaskPage:
        request = task_service_pb2.ListTasksRequest(
            states=[state.value for state in sorted(query.states)],  # type: ignore[misc]  # same numbers
            model=query.model,
            batch=query.batch,
            page_size=query.page_size,
            page_token=query.page_token,
        )
        answer = await _answer_of(
            self._stub.ListTasks(request, timeout=self._timeout_seconds, metadata=as_tenant(tenant))
        )
        return TaskPage(
            tasks=[*map(task_of, answer.tasks)], next_page_token=answer.next_page_token, notice=answer.notice
        )

    @override
    async def cancel(self, tenant: str, task_id: str) -> Task:
        request = task_service_pb2.CancelTaskRequest(id=task_id)
        answer = await _answer_of(
            self._stub.CancelTask(request, timeout=self._timeout_seconds, metadata=as_tenant(tenant))
        )
        return task_of(answer.task)

    @override
    async def delete(self, tenant: str, task_id: str) -> None:
        request = task_service_pb2.DeleteTaskRequest(id=task_id)
        await _answer_of(self._stub.DeleteTask(request, timeout=self._timeout_seconds, metadata=as_tenant(tenant)))

    async def watch(self, tenant: str, task_id: str, after_event: int = 0) -> AsyncGenerator[TaskEvent]:
        """As TaskPort.watch. Leaving the iterator ends the watch, not the task."""
        request = task_service_pb2.WatchTaskRequest(id=task_id, after_event=after_event)
        call = self._stub.WatchTask(request, metadata=as_tenant(tenant))
        try:
            async for response in call:
                news = event_of(response)
                if news is not None:
                    yield news
        except grpc.aio.AioRpcError as error:
            raise _task_error(error) from error
        finally:
            call.cancel()


async def _answer_of(call: Awaitable[AnswerT]) -> AnswerT:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise _task_error(error) from error


def _task_error(error: grpc.aio.AioRpcError) -> WeftError:
    """The error of a failed call: a router that is slow or stopping counts as unreachable."""
    found = error_from_call(error, Reason.SERVICE_UNAVAILABLE)
    if found.reason in {Reason.DEADLINE_EXCEEDED, Reason.CANCELLED}:
        return WeftError(Reason.SERVICE_UNAVAILABLE, "task store timed out", retry_after_seconds=1)
    return found
