"""Clients of the batch store, and of the file store for batches and tasks.

The caller handles the API of the lines: it makes tasks of them and writes the result files. Every method takes the
tenant and raises NOT_FOUND for another tenant's batch or file, and SERVICE_UNAVAILABLE if the store is unreachable.
The records are immutable messages of `router.v1`.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from weft.api.router.v1 import batch_service_pb2 as batch_pb
from weft.api.router.v1 import batch_service_pb2_grpc, file_service_pb2_grpc, task_pb2
from weft.api.router.v1 import file_service_pb2 as file_pb
from weft.durable.store_calls import COMMIT_TIMEOUT_SECONDS, TIMEOUT_SECONDS, store_calls
from weft.durable.tasks import require_known_states
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

BATCH_PREFIX = "batch"
MAX_CUSTOM_ID_CHARS = 256
MAX_LINE_ERRORS = 100
MAX_LINES_PER_MESSAGE = 256
MAX_LINE_BYTES_PER_MESSAGE = 3 * 1024 * 1024
"""Maximum, unless a single line is longer."""
MAX_METADATA = 16
MAX_METADATA_NAME_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class LineResult:
    """The result of a line; a stream carries it in several messages."""

    custom_id: str
    task: task_pb2.Task
    origin: bytes
    """The line as submitted."""
    outputs: Sequence[task_pb2.TaskOutput] = ()


class BatchClient:
    """Client of the batch store."""

    def __init__(self, store: Any, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        """`store`: a channel to the router, or its servicer in this process."""
        self._calls = store_calls(store, batch_service_pb2_grpc.BatchServiceStub, "batch store", timeout_seconds)

    async def create(
        self, new: batch_pb.Batch, lines: AsyncIterator[batch_pb.BatchLine], *, caller: str = "local"
    ) -> batch_pb.Batch:
        """Submits a batch; returns once it and all its lines are durable. No line starts before that.

        `new` has the tenant and the initial fields of `CreateBatchRequest.batch`; with errors it is stored as failed,
        without lines. `caller` is stored with the tasks. A batch with incomplete lines is discarded. Raises
        INVALID_ARGUMENT naming `lines[n].field`, TOO_MANY_RESOURCES, REQUEST_TOO_LARGE for too many lines, and the
        errors of `lines`.
        """
        answer = await self._calls.upload("CreateBatch", _line_messages(new, lines, caller), new.tenant)
        return _known(answer.batch)

    async def get(self, tenant: str, batch_id: str) -> batch_pb.Batch:
        """Returns one batch. Raises NOT_FOUND."""
        return _known((await self._calls.ask("GetBatch", batch_pb.GetBatchRequest(id=batch_id), tenant)).batch)

    async def list_page(self, tenant: str, *, after: str = "", limit: int = 20) -> batch_pb.ListBatchesResponse:
        """Returns batches older than `after` (empty: the newest). Raises NOT_FOUND."""
        request = batch_pb.ListBatchesRequest(after=after, limit=limit)
        page: batch_pb.ListBatchesResponse = await self._calls.ask("ListBatches", request, tenant)
        for batch in page.batches:
            _known(batch)
        return page

    async def cancel(self, tenant: str, batch_id: str) -> batch_pb.Batch:
        """Cancels every unfinished line. Raises NOT_FOUND."""
        request = batch_pb.CancelBatchRequest(id=batch_id)
        answer = await self._calls.ask("CancelBatch", request, tenant, timeout_seconds=COMMIT_TIMEOUT_SECONDS)
        return _known(answer.batch)

    async def results(self, tenant: str, batch_id: str) -> AsyncGenerator[LineResult]:
        """Yields every line in order. Raises NOT_FOUND."""
        request = batch_pb.ReadBatchResultsRequest(id=batch_id)
        first: batch_pb.ReadBatchResultsResponse | None = None
        outputs: list[task_pb2.TaskOutput] = []
        async with aclosing(self._calls.read("ReadBatchResults", request, tenant)) as messages:
            async for message in messages:
                if message.HasField("task"):
                    if first is not None:
                        yield _result_of(first, outputs)
                    first, outputs = message, []
                if first is not None and message.HasField("output"):
                    outputs.append(message.output)
        if first is not None:
            yield _result_of(first, outputs)

    async def ended(self) -> AsyncGenerator[batch_pb.Batch]:
        """Yields batches of all tenants with unwritten results, without end.

        Each goes to one caller until that calls `finish` or closes the generator.
        """
        request = batch_pb.WatchEndedBatchesRequest()
        async with aclosing(self._calls.read("WatchEndedBatches", request, "", is_timed=False)) as messages:
            async for message in messages:
                yield _known(message.batch)

    async def finish(
        self,
        tenant: str,
        batch_id: str,
        *,
        output_file: str = "",
        error_file: str = "",
        problem: batch_pb.BatchLineError | None = None,
    ) -> batch_pb.Batch:
        """Sets the result files; only the first call counts. Raises NOT_FOUND, RESOURCE_IN_USE.

        `problem`: why they could not be written; the batch is assigned again later.
        """
        request = batch_pb.FinishBatchRequest(
            id=batch_id, output_file=output_file, error_file=error_file, problem=problem
        )
        return _known((await self._calls.ask("FinishBatch", request, tenant)).batch)


_BATCH_STATES = frozenset(batch_pb.BatchState.values()) - {batch_pb.BATCH_STATE_UNSPECIFIED}


def _known(batch: batch_pb.Batch) -> batch_pb.Batch:
    """Returns the batch. Raises INTERNAL for a state that this release does not know."""
    if batch.state not in _BATCH_STATES:
        raise WeftError(Reason.INTERNAL, "the router is of a newer release, whose batches this one cannot read")
    return batch


def _result_of(first: batch_pb.ReadBatchResultsResponse, outputs: Sequence[task_pb2.TaskOutput]) -> LineResult:
    require_known_states([first.task])
    return LineResult(custom_id=first.custom_id, task=first.task, origin=first.origin, outputs=tuple(outputs))


async def _line_messages(
    new: batch_pb.Batch, lines: AsyncIterator[batch_pb.BatchLine], caller: str
) -> AsyncGenerator[batch_pb.CreateBatchRequest]:
    yield batch_pb.CreateBatchRequest(batch=new, requested_by=caller)
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


def batch_not_found(batch_id: str) -> WeftError:
    """Returns NOT_FOUND for a batch that is unknown or another tenant's."""
    return WeftError(Reason.NOT_FOUND, f"there is no batch {batch_id}")


FILE_PREFIX = "file"
MAX_FILE_NAME_CHARS = 255
MAX_PIECE_BYTES = 1024 * 1024
"""Maximum size of a read or write."""
BATCH_INPUT = "batch"
BATCH_OUTPUT = "batch_output"
MEDIA_INPUTS = ("user_data", "vision")
"""Purposes of uploaded images and recordings, for tasks and batch lines."""
TASK_INPUT = "task_input"
"""Purpose of a task's input image or recording."""
RESULT = "result"
"""Purpose of an image or recording from a model."""


class FileClient:
    """Client of the file store."""

    def __init__(self, store: Any, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        """`store`: a channel to the router, or its servicer in this process."""
        self._calls = store_calls(store, file_service_pb2_grpc.FileServiceStub, "file store", timeout_seconds)

    async def save(self, new: file_pb.File, content: AsyncIterator[bytes]) -> file_pb.File:
        """Stores a file with the tenant, name, purpose and media type of `new`; returns once it is durable.

        A file with incomplete content is discarded. Raises REQUEST_TOO_LARGE, TOO_MANY_RESOURCES at the tenant's limit,
        and the errors of `content`.
        """
        file: file_pb.File = (await self._calls.upload("UploadFile", _content_messages(new, content), new.tenant)).file
        return file

    async def get(self, tenant: str, file_id: str) -> file_pb.File:
        """Returns a file's metadata. Raises NOT_FOUND."""
        file: file_pb.File = (await self._calls.ask("GetFile", file_pb.GetFileRequest(id=file_id), tenant)).file
        return file

    async def list_page(
        self, tenant: str, *, purpose: str = "", after: str = "", limit: int = 100
    ) -> file_pb.ListFilesResponse:
        """Returns files of a purpose older than `after` (empty: the newest). Raises NOT_FOUND.

        An empty purpose means uploaded files and batch results.
        """
        request = file_pb.ListFilesRequest(purpose=purpose, after=after, limit=limit)
        page: file_pb.ListFilesResponse = await self._calls.ask("ListFiles", request, tenant)
        return page

    async def read(self, tenant: str, file_id: str) -> AsyncGenerator[bytes]:
        """Yields the content in chunks. Raises NOT_FOUND."""
        async with aclosing(self._calls.read("ReadFile", file_pb.ReadFileRequest(id=file_id), tenant)) as messages:
            async for message in messages:
                yield message.data

    async def delete(self, tenant: str, file_id: str) -> None:
        """Deletes a file. Raises NOT_FOUND."""
        await self._calls.ask("DeleteFile", file_pb.DeleteFileRequest(id=file_id), tenant)


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


def file_not_found(file_id: str) -> WeftError:
    """Returns NOT_FOUND for a file that is unknown or another tenant's."""
    return WeftError(Reason.NOT_FOUND, f"no file {file_id} exists")


def batch_status(batch: batch_pb.Batch) -> str:
    """Returns OpenAI's status of the batch."""
    is_cancelled = batch.HasField("cancel_time")
    match batch.state:
        case batch_pb.BATCH_STATE_FAILED:
            return "failed"
        case batch_pb.BATCH_STATE_IN_PROGRESS:
            return "cancelling" if is_cancelled else "in_progress"
        case batch_pb.BATCH_STATE_FINALIZING:
            return "cancelling" if is_cancelled else "finalizing"
        case _:
            if is_cancelled:
                return "cancelled"
            return "expired" if batch.expired_count else "completed"
