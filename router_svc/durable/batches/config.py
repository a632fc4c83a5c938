"""Every bound of files and batches."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from weft.kernel.settings import PUBLIC, Seconds

MEBIBYTE = 1024 * 1024
Count = Annotated[int, Ge(1), Le(10_000_000)]
Bytes = Annotated[int, Ge(1024), Le(1024**5)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Files and batches: `/v1/files` and `/v1/batches`."""

    max_file_bytes: Bytes = 200 * MEBIBYTE
    """Size of an uploaded file; a file of results is as long as the answers are."""
    max_tenant_file_bytes: Bytes = 4 * 1024 * MEBIBYTE
    """Size of all files of one tenant."""
    max_files_per_tenant: Count = 10_000
    """Files of one tenant."""
    keep_file_seconds: Annotated[Seconds, PUBLIC] = 30 * 86_400.0
    """How long a file is kept."""
    max_lines: Count = 50_000
    """Requests of one batch."""
    max_batches_per_tenant: Count = 10_000
    """Batches of one tenant."""
    keep_batch_seconds: Annotated[Seconds, PUBLIC] = 30 * 86_400.0
    """How long a finished batch is kept; its tasks for `router.tasks.keep_seconds`, and until all results are
    written."""
    max_window_seconds: Seconds = 7 * 86_400.0
    """Longest completion window of a batch."""
    sweep_interval_seconds: Seconds = 300.0
    """How often expired files and batches are deleted."""
