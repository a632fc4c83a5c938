"""Files and batches as OpenAI's API shows them."""

from collections.abc import Sequence
from datetime import datetime

from weft.durable.batches import Batch, BatchState, LineError
from weft.durable.files import StoredFile
from weft.kernel.errors import WeftError

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
