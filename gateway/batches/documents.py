"""Files and batches in the format of OpenAI's API."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from gateway.answers.api_object import JsonObject, Shows, object_json
from gateway.intake.request_model import Metadata, StrictModel
from weft.api.router.v1 import batch_service_pb2 as batch_pb
from weft.api.router.v1 import file_service_pb2 as file_pb
from weft.durable.batches import batch_status

WINDOW_SECONDS = 24 * 3600
MIN_WINDOW_SECONDS = 60
MAX_WINDOW_SECONDS = 7 * 86_400


class BatchRequest(StrictModel):
    """The body of POST /v1/batches."""

    input_file_id: Annotated[str, Shows("input_file")]
    """File with the purpose `batch`: one request per line."""
    endpoint: str
    """Endpoint path of all lines."""
    # The only window of OpenAI's API; another one shows in `expires_at`.
    completion_window: Literal["24h"]
    """How long the lines may wait before they start."""
    window_seconds: Annotated[int, Field(ge=MIN_WINDOW_SECONDS, le=MAX_WINDOW_SECONDS)] | None = None
    """Extension: the window in seconds, instead of `completion_window`."""
    wait_for_model: bool = False
    """Extension: whether lines may name unknown models, and wait until they exist."""
    metadata: Metadata | None = None
    output_expires_after: Any = None
    """Accepted and not used: the file store decides how long files are kept."""


class FileObject(BaseModel):
    """A file."""

    id: str
    object: Literal["file"]
    bytes: Annotated[int, Shows("byte_count")]
    created_at: Annotated[int, Shows("create_time")]
    expires_at: Annotated[int, Shows("expire_time")]
    filename: Annotated[str, Shows("name")]
    purpose: Literal["batch", "batch_output", "user_data", "vision", "task_input", "result"]
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
    param: Annotated[str | None, Shows("field")]


class BatchErrors(BaseModel):
    """Errors of a file; validation stops at a maximum number."""

    object: Literal["list"]
    data: list[BatchErrorObject]


class BatchCounts(BaseModel):
    """Numbers of lines: all, completed and failed."""

    total: Annotated[int, Shows("total_count")]
    completed: Annotated[int, Shows("completed_count")]
    failed: Annotated[int, Shows("failed_count")]


class BatchObject(BaseModel):
    """A batch. Times are seconds since 1970."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrors | None
    input_file_id: Annotated[str, Shows("input_file")]
    # The only window of OpenAI's API; another one shows in `expires_at`.
    completion_window: Literal["24h"]
    status: Literal["failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
    output_file_id: Annotated[str | None, Shows("output_file")]
    error_file_id: Annotated[str | None, Shows("error_file")]
    created_at: Annotated[int, Shows("create_time")]
    in_progress_at: int | None
    expires_at: Annotated[int | None, Shows("window_end_time")]
    finalizing_at: Annotated[int | None, Shows("lines_end_time")]
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: Annotated[int | None, Shows("cancel_time")]
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


def file_json(file: file_pb.File) -> JsonObject:
    """Returns a file object."""
    return object_json(FileObject, file)


def batch_json(batch: batch_pb.Batch) -> JsonObject:
    """Returns a batch object; its errors include why its results could not be written."""
    status = batch_status(batch)
    errors = [object_json(BatchErrorObject, each) for each in batch.errors]
    if batch.HasField("problem"):
        errors.append(object_json(BatchErrorObject, batch.problem))
    created_at = batch.create_time.seconds
    ended_at = batch.end_time.seconds if batch.HasField("end_time") else None
    has_begun = batch.state != batch_pb.BATCH_STATE_FAILED
    return object_json(
        BatchObject,
        batch,
        errors={"object": "list", "data": errors} if errors else None,
        status=status,
        in_progress_at=created_at if has_begun else None,
        completed_at=ended_at if status == "completed" else None,
        failed_at=None if has_begun else ended_at or created_at,
        expired_at=ended_at if status == "expired" else None,
        cancelled_at=ended_at if status == "cancelled" else None,
        request_counts=object_json(BatchCounts, batch),
    )
