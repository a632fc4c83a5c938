"""OpenAI's files and batches: what is sent to make a batch, and what is answered, for the OpenAPI document."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StringConstraints

from gateway.intake.request_model import StrictModel
from weft.durable.batches import MAX_METADATA, MAX_METADATA_NAME_CHARS, MAX_METADATA_VALUE_CHARS

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
