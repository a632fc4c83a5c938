"""What may be a batch, but for its lines. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from router_svc.store.tables import MAX_ID_CHARS
from weft.durable.batches import (
    MAX_LINE_ERRORS,
    MAX_METADATA,
    MAX_METADATA_NAME_CHARS,
    MAX_METADATA_VALUE_CHARS,
    LineError,
    NewBatch,
)
from weft.kernel.errors import invalid_field
from weft.kernel.names import require_token

MAX_ENDPOINT_CHARS = 64
MAX_ERROR_CHARS = 1_000
"""What is longer in an error is cut."""
CLOCK_SLACK_SECONDS = 60.0
"""By how much the clock of whoever names the window may be ahead."""


def checked(new: NewBatch, now: float, max_window_seconds: float) -> NewBatch:
    """The batch with errors as long as they may be. Raises INVALID_ARGUMENT naming `batch.field`."""
    if not 1 <= len(new.endpoint) <= MAX_ENDPOINT_CHARS or not new.endpoint.isprintable():
        raise invalid_field("batch.endpoint", f"must be 1 to {MAX_ENDPOINT_CHARS} printable characters")
    if new.input_file:
        require_token(new.input_file, "batch.input_file", MAX_ID_CHARS)
    _check_metadata(new.metadata)
    window_seconds = new.window_ends_at.timestamp() - now
    if not 0 < window_seconds <= max_window_seconds + CLOCK_SLACK_SECONDS:
        raise invalid_field("batch.window_end_time", f"must be in at most {max_window_seconds:g} seconds from now")
    return replace(new, errors=_cut(new.errors))


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise invalid_field("batch.metadata", f"must have at most {MAX_METADATA} entries")
    for name, value in metadata.items():
        if not 1 <= len(name) <= MAX_METADATA_NAME_CHARS:
            raise invalid_field("batch.metadata", f"must have names of 1 to {MAX_METADATA_NAME_CHARS} characters")
        if len(value) > MAX_METADATA_VALUE_CHARS:
            raise invalid_field("batch.metadata", f"must have values of at most {MAX_METADATA_VALUE_CHARS} characters")


def _cut(errors: Sequence[LineError]) -> Sequence[LineError]:
    if len(errors) > MAX_LINE_ERRORS:
        raise invalid_field("batch.errors", f"must have at most {MAX_LINE_ERRORS} entries")
    return tuple(
        LineError(
            code=error.code[:MAX_ERROR_CHARS],
            message=error.message[:MAX_ERROR_CHARS],
            line=error.line,
            field=error.field[:MAX_ERROR_CHARS],
        )
        for error in errors
    )
