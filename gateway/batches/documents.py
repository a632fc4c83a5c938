"""Files and batches as OpenAI's API shows them."""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StringConstraints

from gateway.intake.request_model import StrictModel
from weft.durable.batches import (
    MAX_METADATA,
    MAX_METADATA_NAME_CHARS,
    MAX_METADATA_VALUE_CHARS,
    Batch,
    BatchState,
    LineError,
    StoredFile,
)
from weft.kernel.errors import WeftError

WINDOW_SECONDS = 24 * 3600
MIN_WINDOW_SECONDS = 60
MAX_WINDOW_SECONDS = 7 * 86_400

_Metadata = Annotated[
    dict[
        Annotated[str, StringConstraints(max_length=MAX_METADATA_NAME_CHARS)],
        Annotated[str, StringConstraints(max_length=MAX_METADATA_VALUE_CHARS)],
    ],
    Field(max_length=MAX_METADATA),
]


class BatchRequest(StrictModel):
    """POST /v1/batches."""

    input_file_id: str
    """A file of the purpose `batch`: one request per line."""
    endpoint: str
    """The path that every line names."""
    completion_window: Literal["24h"]
    """How long the lines may wait until they are begun."""
    window_seconds: Annotated[int, Field(ge=MIN_WINDOW_SECONDS, le=MAX_WINDOW_SECONDS)] | None = None
    """Extension: another window, in seconds."""
    wait_for_model: bool = False
    """Extension: whether lines may name what nothing in the mesh has yet, and wait for it."""
    metadata: _Metadata | None = None
    output_expires_after: Any = None
    """Accepted and not used: whoever keeps the files says how long."""


class FileObject(BaseModel):
    """A file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: None


class FileList(BaseModel):
    """A page of files."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(BaseModel):
    """A file that is forgotten."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchErrorObject(BaseModel):
    """What is wrong with a line, or with the file."""

    code: str
    message: str
    line: int | None
    param: str | None


class BatchErrors(BaseModel):
    """Everything that is wrong with a file, as far as it was looked for."""

    object: Literal["list"]
    data: list[BatchErrorObject]


class BatchCounts(BaseModel):
    """How many lines there are, and at which end."""

    total: int
    completed: int
    failed: int


class BatchObject(BaseModel):
    """A batch. Times are seconds since 1970."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: Literal["24h"]
    status: Literal["failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    metadata: dict[str, str] | None


class BatchList(BaseModel):
    """A page of batches."""

    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


JsonObject = dict[str, object]


def file_json(file: StoredFile) -> JsonObject:
    """A file object."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size,
        "created_at": _seconds(file.created_at),
        "expires_at": _seconds(file.expires_at),
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_json(batch: Batch, problem: WeftError | None = None) -> JsonObject:
    """A batch object; `problem`: why its results could not be written yet."""
    status = batch_status(batch)
    errors = [_error_json(each) for each in batch.errors]
    if problem is not None:
        errors.append(_error_json(LineError(code=problem.reason.name.lower(), message=problem.message)))
    ended_at = _seconds(batch.ended_at)
    has_begun = batch.state is not BatchState.FAILED
    counts = batch.counts
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch.input_file,
        # The one window that there is in this API; another one shows in `expires_at`.
        "completion_window": "24h",
        "status": status,
        "output_file_id": batch.output_file or None,
        "error_file_id": batch.error_file or None,
        "created_at": _seconds(batch.created_at),
        "in_progress_at": _seconds(batch.created_at) if has_begun else None,
        "expires_at": _seconds(batch.window_ends_at),
        "finalizing_at": _seconds(batch.lines_ended_at),
        "completed_at": ended_at if status == "completed" else None,
        "failed_at": None if has_begun else _seconds(batch.ended_at or batch.created_at),
        "expired_at": ended_at if status == "expired" else None,
        "cancelling_at": _seconds(batch.cancelled_at),
        "cancelled_at": ended_at if status == "cancelled" else None,
        "request_counts": {"total": counts.total, "completed": counts.completed, "failed": counts.failed},
        "metadata": dict(batch.metadata) or None,
    }


def batch_status(batch: Batch) -> str:
    """OpenAI's word for where it is."""
    is_cancelled = batch.cancelled_at is not None
    match batch.state:
        case BatchState.FAILED:
            return "failed"
        case BatchState.IN_PROGRESS:
            return "cancelling" if is_cancelled else "in_progress"
        case BatchState.FINALIZING:
            return "cancelling" if is_cancelled else "finalizing"
        case BatchState.FINISHED:
            if is_cancelled:
                return "cancelled"
            return "expired" if batch.counts.expired else "completed"


def list_json(documents: Sequence[JsonObject], *, has_more: bool) -> JsonObject:
    """A page of either."""
    return {
        "object": "list",
        "data": documents,
        "first_id": documents[0]["id"] if documents else None,
        "last_id": documents[-1]["id"] if documents else None,
        "has_more": has_more,
    }


def _error_json(error: LineError) -> JsonObject:
    return {
        "code": error.code,
        "message": error.message,
        "line": error.line or None,
        "param": error.field or None,
    }


def _seconds(moment: datetime | None) -> int | None:
    return None if moment is None else int(moment.timestamp())
