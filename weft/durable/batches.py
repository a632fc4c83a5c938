"""Batches and their files: the ports to the batch store and the file store, and their values.

The caller speaks the API of the lines: it makes tasks of them, and writes the files of results. Every method takes the
tenant: another tenant's batch or file is NOT_FOUND. Every method raises SERVICE_UNAVAILABLE when the store cannot be
reached.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import IntEnum
from typing import Protocol

from weft.api.router.v1 import task_pb2
from weft.durable.tasks import Task
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

BATCH_PREFIX = "batch"
MAX_CUSTOM_ID_CHARS = 256
MAX_LINE_ERRORS = 100
MAX_METADATA = 16
MAX_METADATA_NAME_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512


class BatchState(IntEnum):
    """The state of a batch without that of its lines; numbers as in `router.v1.BatchState`."""

    FAILED = 1
    """Its lines are invalid; none of them was started."""
    IN_PROGRESS = 2
    """Lines are queued or running."""
    FINALIZING = 3
    """Every line has ended, and the results are not written yet."""
    FINISHED = 4
    """The results are written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineError:
    """An error of a line of an input file."""

    code: str
    message: str
    line: int = 0
    """Counted from 1; 0: the whole file."""
    field: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineCounts:
    """Number of lines in total and by final state."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    """Without expired lines."""
    cancelled: int = 0
    expired: int = 0
    """Not started within the window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch. Times are UTC."""

    id: str
    tenant: str
    state: BatchState
    endpoint: str
    input_file: str
    output_file: str = ""
    error_file: str = ""
    errors: Sequence[LineError] = ()
    counts: LineCounts = LineCounts()
    metadata: Mapping[str, str] = field(default_factory=dict)
    created_at: datetime
    window_ends_at: datetime
    cancelled_at: datetime | None = None
    lines_ended_at: datetime | None = None
    ended_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBatch:
    """A new batch. With errors it is stored as failed, without lines."""

    tenant: str
    endpoint: str
    input_file: str
    window_ends_at: datetime
    metadata: Mapping[str, str] = field(default_factory=dict)
    errors: Sequence[LineError] = ()
    caller: str = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLine:
    """One line, as a task."""

    custom_id: str
    spec: task_pb2.TaskSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LineResult:
    """The result of one line."""

    custom_id: str
    task: Task
    origin: bytes
    """The line as its submitter sent it."""
    outputs: Sequence[task_pb2.TaskOutput] = ()
    """Outputs of a completed line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPage:
    """A page of batches, the newest first."""

    batches: Sequence[Batch]
    has_more: bool


class BatchPort(Protocol):
    """The batch store."""

    async def create(self, new: NewBatch, lines: AsyncIterator[BatchLine]) -> Batch:
        """Accepts a batch; returns once it and all its lines are durable. Until then none of them is started.

        A batch with incomplete lines is discarded. Raises INVALID_ARGUMENT naming `lines[n].field`, TOO_MANY_RESOURCES,
        REQUEST_TOO_LARGE for too many lines, and what `lines` raises.
        """
        ...

    async def get(self, tenant: str, batch_id: str) -> Batch:
        """Returns one batch. Raises NOT_FOUND."""
        ...

    async def list_page(self, tenant: str, *, after: str = "", limit: int = 20) -> BatchPage:
        """Returns batches older than `after` (empty: the newest). Raises NOT_FOUND."""
        ...

    async def cancel(self, tenant: str, batch_id: str) -> Batch:
        """Cancels every unfinished line. Raises NOT_FOUND."""
        ...

    def results(self, tenant: str, batch_id: str) -> AsyncGenerator[LineResult]:
        """Yields every line in order. Raises NOT_FOUND."""
        ...

    async def finish(self, tenant: str, batch_id: str, *, output_file: str, error_file: str) -> Batch:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A stored file. Times are UTC."""

    id: str
    tenant: str
    name: str
    purpose: str
    """BATCH_INPUT or BATCH_OUTPUT."""
    size: int
    """Bytes."""
    created_at: datetime
    expires_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFile:
    """A new file."""

    tenant: str
    name: str
    purpose: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePage:
    """A page of files, the newest first."""

    files: Sequence[StoredFile]
    has_more: bool


class FilePort(Protocol):
    """The file store."""

    async def save(self, new: NewFile, content: AsyncIterator[bytes]) -> StoredFile:
        """Stores a file; returns once it is durable. A file with incomplete content is discarded.

        Raises REQUEST_TOO_LARGE, TOO_MANY_RESOURCES at the tenant's limit, and the errors of `content`.
        """
        ...

    async def get(self, tenant: str, file_id: str) -> StoredFile:
        """Returns a file's metadata. Raises NOT_FOUND."""
        ...

    async def list_page(self, tenant: str, *, purpose: str = "", after: str = "", limit: int = 100) -> FilePage:
        """Returns files of a purpose (empty: all) older than `after` (empty: the newest). Raises NOT_FOUND."""
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
