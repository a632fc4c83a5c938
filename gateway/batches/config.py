"""Every bound of files and batches at the edge. Whoever keeps them has bounds of their own."""

from dataclasses import dataclass

MEBIBYTE = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEdgeConfig:
    """What callers may send, and how much of it is done at once."""

    max_file_bytes: int = 200 * MEBIBYTE
    """Of one file that is sent."""
    upload_timeout_seconds: float = 3600.0
    """How long the bytes of a file may take to come in; the pace of `connections` holds besides."""
    max_uploads: int = 32
    """Files that are taken in at once; one more is refused. Each holds about two pieces of a file in memory."""
    max_lines: int = 50_000
    """Requests of one batch."""
    max_line_bytes: int = MEBIBYTE
    """One line of an input file."""
    max_creations: int = 4
    """Batches that are made at once; one more is refused. Each is work for the processor as long as its file is."""
    max_finishing: int = 4
    """Batches whose results are written at once; whoever asks for one more finds it finalizing."""
    finish_wait_seconds: float = 1.0
    """How long whoever asks for a batch waits for its results to be written."""
    finish_timeout_seconds: float = 900.0
    """How long the results of one batch may take to be written; then they are begun anew when somebody asks."""
    store_timeout_seconds: float = 30.0
    """How long whoever keeps files and batches may take to answer, and for each piece of a file."""
