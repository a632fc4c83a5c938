"""Files and batches in the format of OpenAI's API."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from gateway.intake.request_model import Metadata, StrictModel
from weft.api.router.v1 import batch_service_pb2 as batch_pb
from weft.api.router.v1 import file_service_pb2 as file_pb
from weft.kernel.errors import WeftError

WINDOW_SECONDS = 24 * 3600
MIN_WINDOW_SECONDS = 60
MAX_WINDOW_SECONDS = 7 * 86_400


class BatchRequest(StrictModel):
    """The body of POST /v1/batches."""

    input_file_id: str
    """A file of the purpose `batch`: one request per line."""
    endpoint: str
    """The endpoint path of all its lines."""
    completion_window: Literal["24h"]
    """How long the lines may wait before they start."""
    window_seconds: Annotated[int, Field(ge=MIN_WINDOW_SECONDS, le=MAX_WINDOW_SECONDS)] | None = None
    """Extension: another window, in seconds."""
    wait_for_model: bool = False
    """Extension: whether lines may name unknown models, and wait for them."""
    metadata: Metadata | None = None
    output_expires_after: Any = None
    """Accepted and not used: the store decides how long files are kept."""


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
    """A deleted file."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchErrorObject(BaseModel):
    """An error of a line, or of the file."""

    code: str
    message: str
    line: int | None
    param: str | None


class BatchErrors(BaseModel):
    """The errors of a file; validation stops at a maximum number."""

    object: Literal["list"]
    data: list[BatchErrorObject]


class BatchCounts(BaseModel):
    """Number of lines, and of those that ended, by outcome."""

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


def file_json(file: file_pb.File) -> JsonObject:
    """Returns a file object."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.byte_count,
        "created_at": file.create_time.seconds,
        "expires_at": file.expire_time.seconds,
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_json(batch: batch_pb.Batch, problem: WeftError | None = None) -> JsonObject:
    """Returns a batch object; `problem`: why its results could not be written yet."""
    status = batch_status(batch)
    errors = [_error_json(each) for each in batch.errors]
    if problem is not None:
        errors.append(_error_json(batch_pb.BatchLineError(code=problem.reason.name.lower(), message=problem.message)))
    ended_at = _seconds(batch, "end_time")
    has_begun = batch.state != batch_pb.BATCH_STATE_FAILED
    created_at = batch.create_time.seconds
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch.input_file,
        # The only window of OpenAI's API; another one shows in `expires_at`.
        "completion_window": "24h",
        "status": status,
        "output_file_id": batch.output_file or None,
        "error_file_id": batch.error_file or None,
        "created_at": created_at,
        "in_progress_at": created_at if has_begun else None,
        "expires_at": batch.window_end_time.seconds,
        "finalizing_at": _seconds(batch, "lines_end_time"),
        "completed_at": ended_at if status == "completed" else None,
        "failed_at": None if has_begun else ended_at or created_at,
        "expired_at": ended_at if status == "expired" else None,
        "cancelling_at": _seconds(batch, "cancel_time"),
        "cancelled_at": ended_at if status == "cancelled" else None,
        "request_counts": {
            "total": batch.total_count,
            "completed": batch.completed_count,
            "failed": batch.failed_count,
        },
        "metadata": dict(batch.metadata) or None,
    }


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


def _error_json(error: batch_pb.BatchLineError) -> JsonObject:
    return {
        "code": error.code,
        "message": error.message,
        "line": error.line or None,
        "param": error.field or None,
    }


def _seconds(batch: batch_pb.Batch, field: "_OptionalTime") -> int | None:
    """Returns a time of a batch in seconds since 1970; None: it is not set."""
    return getattr(batch, field).seconds if batch.HasField(field) else None


_OptionalTime = Literal["end_time", "lines_end_time", "cancel_time"]
