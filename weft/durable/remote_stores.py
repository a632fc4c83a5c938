"""The task, batch, file and response stores over gRPC.

A store that is slow or stopping counts as unreachable: SERVICE_UNAVAILABLE. The tenant is sent as metadata: the caller
must be trusted with it.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import grpc
from typing_extensions import override

from weft.api.router.v1 import batch_service_pb2 as batch_pb
from weft.api.router.v1 import (
    batch_service_pb2_grpc,
    file_service_pb2_grpc,
    stored_response_service_pb2_grpc,
    task_pb2,
    task_service_pb2_grpc,
)
from weft.api.router.v1 import file_service_pb2 as file_pb
from weft.api.router.v1 import stored_response_service_pb2 as response_pb
from weft.api.router.v1 import task_service_pb2 as task_pb
from weft.durable.batches import MAX_PIECE_BYTES, BatchPort, FilePort, LineResult
from weft.durable.responses import ResponseStore
from weft.durable.tasks import TaskPort, copy_of
from weft.kernel.errors import WeftError
from weft.kernel.interrupt import task_is_cancelled
from weft.kernel.reasons import Reason
from weft.kernel.rpc import error_from_call

if TYPE_CHECKING:
    from weft.api.router.v1.batch_service_pb2_grpc import BatchServiceAsyncStub
    from weft.api.router.v1.file_service_pb2_grpc import FileServiceAsyncStub
    from weft.api.router.v1.stored_response_service_pb2_grpc import StoredResponseServiceAsyncStub
    from weft.api.router.v1.task_service_pb2_grpc import TaskServiceAsyncStub


TIMEOUT_SECONDS = 10.0
"""Timeout of an answer, and of the next message of a stream."""
TASK_TIMEOUT_SECONDS = 30.0
"""Timeout of every call about tasks but watch. A router whose database is locked answers within it."""
WRITE_TIMEOUT_SECONDS = 60.0
"""Minimum timeout of a chunk of an upload: the store first writes the previous ones, on a disk that may be slow."""
COMMIT_TIMEOUT_SECONDS = 600.0
"""Minimum timeout of the final answer of an upload: after a timeout the outcome is unknown. A store that is gone is
noticed long before, by its channel."""
MAX_LINES_PER_MESSAGE = 256
MAX_LINE_BYTES_PER_MESSAGE = 3 * 1024 * 1024
"""Unless one line alone is longer."""
TENANT = "x-tenant-id"
_WRITE_FAILED = "Internal error from Core"
"""Details of a call in grpc.aio after a failed write."""

ResultT = TypeVar("ResultT")


def as_tenant(tenant: str) -> tuple[tuple[str, str], ...]:
    """Metadata of a call for a tenant."""
    return ((TENANT, tenant),)


@dataclass(frozen=True, slots=True)
class StoreCalls:
    """Calls of one store, with their timeout and the error of a store that does not answer."""

    timeout_seconds: float
    timed_out: str
    """The message of that error."""
    retry_after_seconds: float | None = None

    async def ask(self, method: Any, request: object, tenant: str = "", *, timeout_seconds: float | None = None) -> Any:
        """Returns the response of a unary call; `tenant` is empty where the request names it."""
        timeout = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        with self._explained():
            return await method(request, timeout=timeout, metadata=as_tenant(tenant) if tenant else None)

    async def upload(self, call: "grpc.aio.StreamUnaryCall[Any, ResultT]", messages: AsyncIterator[object]) -> ResultT:
        """Sends all messages with back-pressure and returns the answer.

        Raises the errors of `messages`; the store then sees a cancelled call and stores nothing.
        """
        first_status = _FirstStatus(call)
        try:
            async for message in messages:
                with self._explained(first_status):
                    if not await _write(call, message, max(self.timeout_seconds, WRITE_TIMEOUT_SECONDS)):
                        break
            with self._explained(first_status):
                async with asyncio.timeout(max(self.timeout_seconds, COMMIT_TIMEOUT_SECONDS)):
                    if not call.done():
                        await call.done_writing()
                    return await call
        finally:
            # Cancelling a finished call has no effect.
            call.cancel()

    async def read(
        self, call: "grpc.aio.UnaryStreamCall[Any, ResultT]", *, is_timed: bool = True
    ) -> AsyncGenerator[ResultT]:
        """Yields every message of a call. Leaving the iterator ends the call."""
        try:
            while True:
                with self._explained():
                    async with asyncio.timeout(self.timeout_seconds if is_timed else None):
                        message = await call.read()
                if message is grpc.aio.EOF:
                    return
                yield cast("ResultT", message)
        finally:
            call.cancel()

    @contextmanager
    def _explained(self, first_status: "_FirstStatus | None" = None) -> Iterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            why = error if first_status is None else first_status.instead_of(error)
            found = error_from_call(why, Reason.SERVICE_UNAVAILABLE)
            if found.reason in {Reason.DEADLINE_EXCEEDED, Reason.CANCELLED}:
                found = self._silent()
            raise found from error
        except TimeoutError as error:
            raise self._silent() from error
        except asyncio.CancelledError:
            if task_is_cancelled():
                raise
            raise self._silent() from None

    def _silent(self) -> WeftError:
        return WeftError(Reason.SERVICE_UNAVAILABLE, self.timed_out, retry_after_seconds=self.retry_after_seconds)


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


class RemoteTasks(TaskPort):
    """A TaskPort over gRPC."""

    def __init__(self, channel: grpc.aio.Channel, *, timeout_seconds: float = TASK_TIMEOUT_SECONDS) -> None:
        self._calls = StoreCalls(timeout_seconds, "task store timed out", retry_after_seconds=1)
        self._stub = cast("TaskServiceAsyncStub", task_service_pb2_grpc.TaskServiceStub(channel))

    @override
    async def submit(
        self, tenant: str, request: task_pb.SubmitTaskRequest, *, caller: str = "local"
    ) -> task_pb.SubmitTaskResponse:
        """As TaskPort.submit. The store believes `caller` of a caller who may act for others."""
        request.requested_by = caller
        answer: task_pb.SubmitTaskResponse = await self._calls.ask(self._stub.SubmitTask, request, tenant)
        _require_known_states([answer.task])
        return answer

    @override
    async def get(self, tenant: str, task_id: str) -> task_pb2.Task:
        return copy_of((await self.details(tenant, task_id)).task)

    @override
    async def details(self, tenant: str, task_id: str) -> task_pb.GetTaskResponse:
        request = task_pb.GetTaskRequest(id=task_id)
        answer: task_pb.GetTaskResponse = await self._calls.ask(self._stub.GetTask, request, tenant)
        _require_known_states([answer.task])
        return answer

    @override
    async def list_page(self, tenant: str, request: task_pb.ListTasksRequest) -> task_pb.ListTasksResponse:
        answer: task_pb.ListTasksResponse = await self._calls.ask(self._stub.ListTasks, request, tenant)
        _require_known_states(answer.tasks)
        return answer

    @override
    async def cancel(self, tenant: str, task_id: str) -> task_pb2.Task:
        request = task_pb.CancelTaskRequest(id=task_id)
        task: task_pb2.Task = (await self._calls.ask(self._stub.CancelTask, request, tenant)).task
        _require_known_states([task])
        return task

    @override
    async def delete(self, tenant: str, task_id: str) -> None:
        await self._calls.ask(self._stub.DeleteTask, task_pb.DeleteTaskRequest(id=task_id), tenant)

    @override
    async def watch(self, tenant: str, task_id: str, after_event: int = 0) -> AsyncGenerator[task_pb.WatchTaskResponse]:
        request = task_pb.WatchTaskRequest(id=task_id, after_event=after_event)
        call: Any = self._stub.WatchTask(request, metadata=as_tenant(tenant))
        async with aclosing(self._calls.read(call, is_timed=False)) as messages:
            async for message in messages:
                if message.HasField("task"):
                    _require_known_states([message.task])
                # Of an unknown kind otherwise.
                if message.WhichOneof("news") is not None:
                    yield message

    @override
    async def watch_all(self, tenant: str, past_count: int = 0) -> AsyncGenerator[task_pb.WatchTasksResponse]:
        request = task_pb.WatchTasksRequest(past_count=past_count)
        call: Any = self._stub.WatchTasks(request, metadata=as_tenant(tenant))
        async with aclosing(self._calls.read(call, is_timed=False)) as messages:
            async for message in messages:
                if message.HasField("task"):
                    _require_known_states([message.task])
                yield message


def _require_known_states(tasks: Iterable[task_pb2.Task]) -> None:
    """Raises INTERNAL for a task of a state that this release does not know."""
    if not all(task.state in _TASK_STATES for task in tasks):
        raise WeftError(Reason.INTERNAL, "the router is of a newer release, whose tasks this one cannot read")


_TASK_STATES = frozenset(task_pb2.TaskState.values()) - {task_pb2.TASK_STATE_UNSPECIFIED}


class RemoteBatches(BatchPort):
    """A BatchPort over gRPC."""

    def __init__(self, channel: grpc.aio.Channel, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._calls = StoreCalls(timeout_seconds, "the store of batches timed out")
        self._stub = cast("BatchServiceAsyncStub", batch_service_pb2_grpc.BatchServiceStub(channel))

    @override
    async def create(
        self,
        new: batch_pb.Batch,
        lines: AsyncIterator[batch_pb.BatchLine],
        *,
        caller: str = "local",
    ) -> batch_pb.Batch:
        """As BatchPort.create. `caller` is not sent: the store authenticates the caller itself."""
        call: Any = self._stub.CreateBatch(metadata=as_tenant(new.tenant))
        async with aclosing(_line_messages(new, lines)) as messages:
            return _known((await self._calls.upload(call, messages)).batch)

    @override
    async def get(self, tenant: str, batch_id: str) -> batch_pb.Batch:
        request = batch_pb.GetBatchRequest(id=batch_id)
        return _known((await self._calls.ask(self._stub.GetBatch, request, tenant)).batch)

    @override
    async def list_page(self, tenant: str, *, after: str = "", limit: int = 20) -> batch_pb.ListBatchesResponse:
        request = batch_pb.ListBatchesRequest(after=after, limit=limit)
        page: batch_pb.ListBatchesResponse = await self._calls.ask(self._stub.ListBatches, request, tenant)
        for batch in page.batches:
            _known(batch)
        return page

    @override
    async def cancel(self, tenant: str, batch_id: str) -> batch_pb.Batch:
        request = batch_pb.CancelBatchRequest(id=batch_id)
        timeout_seconds = max(self._calls.timeout_seconds, COMMIT_TIMEOUT_SECONDS)
        answer = await self._calls.ask(self._stub.CancelBatch, request, tenant, timeout_seconds=timeout_seconds)
        return _known(answer.batch)

    @override
    async def results(self, tenant: str, batch_id: str) -> AsyncGenerator[LineResult]:
        request = batch_pb.ReadBatchResultsRequest(id=batch_id)
        call: Any = self._stub.ReadBatchResults(request, metadata=as_tenant(tenant))
        first: batch_pb.ReadBatchResultsResponse | None = None
        outputs: list[task_pb2.TaskOutput] = []
        async with aclosing(self._calls.read(call)) as messages:
            async for message in messages:
                if message.HasField("task"):
                    if first is not None:
                        yield _result_of(first, outputs)
                    first, outputs = message, []
                if first is not None and message.HasField("output"):
                    outputs.append(message.output)
        if first is not None:
            yield _result_of(first, outputs)

    @override
    async def finish(self, tenant: str, batch_id: str, *, output_file: str, error_file: str) -> batch_pb.Batch:
        request = batch_pb.FinishBatchRequest(id=batch_id, output_file=output_file, error_file=error_file)
        return _known((await self._calls.ask(self._stub.FinishBatch, request, tenant)).batch)


_BATCH_STATES = frozenset(batch_pb.BatchState.values()) - {batch_pb.BATCH_STATE_UNSPECIFIED}


def _known(batch: batch_pb.Batch) -> batch_pb.Batch:
    """Returns the batch. Raises INTERNAL for a state that this release does not know."""
    if batch.state not in _BATCH_STATES:
        raise WeftError(Reason.INTERNAL, "the router is of a newer release, whose batches this one cannot read")
    return batch


def _result_of(first: batch_pb.ReadBatchResultsResponse, outputs: Sequence[task_pb2.TaskOutput]) -> LineResult:
    _require_known_states([first.task])
    return LineResult(custom_id=first.custom_id, task=first.task, origin=first.origin, outputs=tuple(outputs))


async def _line_messages(
    new: batch_pb.Batch, lines: AsyncIterator[batch_pb.BatchLine]
) -> AsyncGenerator[batch_pb.CreateBatchRequest]:
    yield batch_pb.CreateBatchRequest(batch=new)
    some: list[batch_pb.BatchLine] = []
    size, count = 0, 0
    async for line in lines:
        length = line.ByteSize()
        if some and (len(some) >= MAX_LINES_PER_MESSAGE or size + length > MAX_LINE_BYTES_PER_MESSAGE):
            yield batch_pb.CreateBatchRequest(lines=some)
            some, size = [], 0
        some.append(line)
        size += length
        count += 1
    yield batch_pb.CreateBatchRequest(batch=batch_pb.Batch(total_count=count), lines=some)


class RemoteFiles(FilePort):
    """A FilePort over gRPC."""

    def __init__(self, channel: grpc.aio.Channel, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._calls = StoreCalls(timeout_seconds, "the store of files timed out")
        self._stub = cast("FileServiceAsyncStub", file_service_pb2_grpc.FileServiceStub(channel))

    @override
    async def save(self, new: file_pb.File, content: AsyncIterator[bytes]) -> file_pb.File:
        call: Any = self._stub.UploadFile(metadata=as_tenant(new.tenant))
        async with aclosing(_content_messages(new, content)) as messages:
            file: file_pb.File = (await self._calls.upload(call, messages)).file
            return file

    @override
    async def get(self, tenant: str, file_id: str) -> file_pb.File:
        request = file_pb.GetFileRequest(id=file_id)
        file: file_pb.File = (await self._calls.ask(self._stub.GetFile, request, tenant)).file
        return file

    @override
    async def list_page(
        self, tenant: str, *, purpose: str = "", after: str = "", limit: int = 100
    ) -> file_pb.ListFilesResponse:
        request = file_pb.ListFilesRequest(purpose=purpose, after=after, limit=limit)
        page: file_pb.ListFilesResponse = await self._calls.ask(self._stub.ListFiles, request, tenant)
        return page

    @override
    async def read(self, tenant: str, file_id: str) -> AsyncGenerator[bytes]:
        call: Any = self._stub.ReadFile(file_pb.ReadFileRequest(id=file_id), metadata=as_tenant(tenant))
        async with aclosing(self._calls.read(call)) as messages:
            async for message in messages:
                yield message.data

    @override
    async def delete(self, tenant: str, file_id: str) -> None:
        await self._calls.ask(self._stub.DeleteFile, file_pb.DeleteFileRequest(id=file_id), tenant)


async def _content_messages(
    new: file_pb.File, content: AsyncIterator[bytes]
) -> AsyncGenerator[file_pb.UploadFileRequest]:
    yield file_pb.UploadFileRequest(file=new)
    size = 0
    async for data in content:
        for start in range(0, len(data), MAX_PIECE_BYTES):
            yield file_pb.UploadFileRequest(data=data[start : start + MAX_PIECE_BYTES])
        size += len(data)
    yield file_pb.UploadFileRequest(file=file_pb.File(byte_count=size))


class RemoteResponses(ResponseStore):
    """A ResponseStore over gRPC."""

    def __init__(self, channel: grpc.aio.Channel, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._calls = StoreCalls(timeout_seconds, "response store timed out")
        stub = stored_response_service_pb2_grpc.StoredResponseServiceStub(channel)
        self._stub = cast("StoredResponseServiceAsyncStub", stub)

    @override
    async def save(self, response: response_pb.StoredResponse) -> None:
        request = response_pb.SaveResponseRequest(response=response)
        await self._calls.ask(self._stub.SaveResponse, request)

    @override
    async def get(self, tenant: str, response_id: str) -> response_pb.StoredResponse:
        request = response_pb.GetResponseRequest(tenant=tenant, id=response_id)
        found: response_pb.GetResponseResponse = await self._calls.ask(self._stub.GetResponse, request)
        return found.response

    @override
    async def chain(self, tenant: str, response_id: str) -> Sequence[response_pb.StoredResponse]:
        request = response_pb.ListChainRequest(tenant=tenant, id=response_id)
        found: response_pb.ListChainResponse = await self._calls.ask(self._stub.ListChain, request)
        return found.responses

    @override
    async def delete(self, tenant: str, response_id: str) -> None:
        request = response_pb.DeleteResponseRequest(tenant=tenant, id=response_id)
        await self._calls.ask(self._stub.DeleteResponse, request)
