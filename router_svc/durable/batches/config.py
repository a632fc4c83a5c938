"""Every bound of files and batches."""

from dataclasses import dataclass

MEBIBYTE = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Every bound of files and batches."""

    max_file_bytes: int = 200 * MEBIBYTE
    """Of one file that is sent; one of results is as long as the answers are."""
    max_tenant_file_bytes: int = 4 * 1024 * MEBIBYTE
    """Of all files that one tenant keeps."""
    max_files_per_tenant: int = 10_000
    """Files that one tenant keeps."""
    keep_file_seconds: float = 30 * 86_400.0
    """How long a file is kept."""
    max_lines: int = 50_000
    """Of one batch."""
    max_batches_per_tenant: int = 10_000
    """Batches that one tenant keeps."""
    keep_batch_seconds: float = 30 * 86_400.0
    """How long a batch is kept after its end; its tasks as long as any (`router.tasks.keep_seconds`), and until its
    results are written."""
    max_window_seconds: float = 7 * 86_400.0
    """The longest window that a batch may have."""
    sweep_interval_seconds: float = 300.0
    """How often those that are over are forgotten."""
