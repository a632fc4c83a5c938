"""Batches, and the files of batches and tasks: the ports to the batch store and the file store.

The caller speaks the API of the lines: it makes tasks of them, and writes the files of results. Every method takes the
tenant: another tenant's batch or file is NOT_FOUND. Every method raises SERVICE_UNAVAILABLE when the store cannot be
reached. The records are the messages of `router.v1`, which are never changed: build a new one.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from weft.api.router.v1 import batch_service_pb2 as batch_pb
from weft.api.router.v1 import file_service_pb2 as file_pb
from weft.api.router.v1 import task_pb2
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

BATCH_PREFIX = "batch"
MAX_CUSTOM_ID_CHARS = 256
MAX_LINE_ERRORS = 100
MAX_METADATA = 16
MAX_METADATA_NAME_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class LineResult:
    """The result of one line; a stream carries it in several messages."""

    custom_id: str
    task: task_pb2.Task
    origin: bytes
    """The line as its submitter sent it."""
    outputs: Sequence[task_pb2.TaskOutput] = ()
    """Outputs of a completed line."""


class BatchPort(Protocol):
    """The batch store."""

    async def create(
        self, new: batch_pb.Batch, lines: AsyncIterator[batch_pb.BatchLine], *, caller: str = "local"
    ) -> batch_pb.Batch:
        """Accepts a batch; returns once it and all its lines are durable. Until then none of them is started.

        `new` has the tenant and what `CreateBatchRequest.batch` has first; with errors it is stored as failed, without
        lines. `caller` is stored with the tasks; a store behind a channel authenticates the caller itself. A batch with
        incomplete lines is discarded. Raises INVALID_ARGUMENT naming `lines[n].field`, TOO_MANY_RESOURCES,
        REQUEST_TOO_LARGE for too many lines, and what `lines` raises.
        """
        ...

    async def get(self, tenant: str, batch_id: str) -> batch_pb.Batch:
        """Returns one batch. Raises NOT_FOUND."""
        ...

    async def list_page(self, tenant: str, *, after: str = "", limit: int = 20) -> batch_pb.ListBatchesResponse:
        """Returns batches older than `after` (empty: the newest). Raises NOT_FOUND."""
        ...

    async def cancel(self, tenant: str, batch_id: str) -> batch_pb.Batch:
        """Cancels every unfinished line. Raises NOT_FOUND."""
        ...

    def results(self, tenant: str, batch_id: str) -> AsyncGenerator[LineResult]:
        """Yields every line in order. Raises NOT_FOUND."""
        ...

    async def finish(self, tenant: str, batch_id: str, *, output_file: str, error_file: str) -> batch_pb.Batch:
        """Sets the files of the results; only the first call counts. Raises NOT_FOUND, RESOURCE_IN_USE."""
        ...


def batch_not_found(batch_id: str) -> WeftError:
    """NOT_FOUND for a batch that is unknown or another tenant's."""
    return WeftError(Reason.NOT_FOUND, f"no batch {batch_id} exists")


FILE_PREFIX = "file"
MAX_FILE_NAME_CHARS = 255
MAX_PIECE_BYTES = 1024 * 1024
"""Size limit of one read or write."""
BATCH_INPUT = "batch"
BATCH_OUTPUT = "batch_output"
MEDIA_INPUTS = ("user_data", "vision")
"""Purposes of uploaded images and recordings, for tasks and lines of batches."""
TASK_INPUT = "task_input"
"""Purpose of an image or a recording that a task was given."""
RESULT = "result"
"""Purpose of an image or a recording that a model has made."""


class FilePort(Protocol):
    """The file store."""

    async def save(self, new: file_pb.File, content: AsyncIterator[bytes]) -> file_pb.File:
        """Stores a file, of whose message tenant, name, purpose and media type are read; returns once it is durable.

        A file with incomplete content is discarded.

        Raises REQUEST_TOO_LARGE, TOO_MANY_RESOURCES at the tenant's limit, and the errors of `content`.
        """
        ...

    async def get(self, tenant: str, file_id: str) -> file_pb.File:
        """Returns a file's metadata. Raises NOT_FOUND."""
        ...

    async def list_page(
        self, tenant: str, *, purpose: str = "", after: str = "", limit: int = 100
    ) -> file_pb.ListFilesResponse:
        """Returns files of a purpose older than `after`; empty: the newest. Raises NOT_FOUND.

        No purpose: those that callers upload, and results of batches.
        """
        ...

    def read(self, tenant: str, file_id: str) -> AsyncGenerator[bytes]:
        """Yields the content in chunks. Raises NOT_FOUND."""
        ...

    async def delete(self, tenant: str, file_id: str) -> None:
        """Deletes a file. Raises NOT_FOUND."""
        ...


def file_not_found(file_id: str) -> WeftError:
    """NOT_FOUND for a file that is unknown or another tenant's."""
    return WeftError(Reason.NOT_FOUND, f"no file {file_id} exists")
