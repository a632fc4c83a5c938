"""The sections of the configuration file about durable tasks, files and batches."""

from typing import Annotated

from pydantic import Field

from weft_app.config.config_section import Seconds, Section

_MEBIBYTE = 1024 * 1024
Count = Annotated[int, Field(ge=1, le=10_000_000)]
Bytes = Annotated[int, Field(ge=1024, le=1024**5)]


class TasksSection(Section):
    """Durable tasks: accepted, and finished even if everybody sleeps in between."""

    pending_limit_seconds: Seconds = 3600.0
    """How long a task may wait until it is begun, and after each lost attempt; then it fails."""
    max_attempts: Count = 5
    """Attempts that came to nothing after which a task fails."""
    lease_seconds: Seconds = 15.0
    """How long a claim is good without a heartbeat. A third of it is the heartbeat's interval."""
    run_timeout_seconds: Seconds = 3600.0
    """How long one attempt may run."""
    retry_delay_seconds: Seconds = 1.0
    """Pause after a lost attempt; doubles with each ..."""
    max_retry_delay_seconds: Seconds = 60.0
    """... up to this."""
    keep_seconds: Seconds = 7 * 86_400.0
    """How long a task is kept after its end."""
    sweep_interval_seconds: Seconds = 300.0
    """How often those that waited too long are failed, and those that are over are forgotten."""
    sweep_batch: Count = 500
    """Tasks that one statement of a sweep changes: others have their turn in between."""
    poll_interval_seconds: Seconds = 5.0
    """How often tasks are looked for that nobody told of."""
    max_running: Count = 256
    """Attempts that one router has under way."""
    max_lanes: Count = 256
    """Pairs of model and tenant that one router has tasks waiting for slots of at once; the others' turn comes next."""
    offers_per_lane: Count = 4
    """Tasks of such a pair that wait for a slot at once."""
    peeked_per_lane: Count = 32
    """Tasks of such a pair that are read ahead."""
    max_peeked_bytes: Bytes = 64 * _MEBIBYTE
    """Of all tasks that are read ahead."""
    piece_interval_seconds: Seconds = 0.25
    """How often what a running task has said is written ..."""
    watched_piece_interval_seconds: Seconds = 0.05
    """... and where somebody watches it."""
    max_piece_bytes: Bytes = 256 * 1024
    """What is written at the latest."""
    max_spec_bytes: Bytes = 16 * _MEBIBYTE
    """Of one task's request, what it brings with it included."""
    max_origin_bytes: Bytes = 12 * _MEBIBYTE
    """Of what a submitter wants back."""
    max_result_bytes: Bytes = 64 * _MEBIBYTE
    """Of one task's answer."""
    max_open_per_tenant: Count = 200_000
    """Tasks of one tenant that are not at their end."""
    max_watches: Count = 1024
    """Watchers of tasks at once."""
    watch_poll_seconds: Seconds = 2.0
    """How often a watcher looks by itself: news of another router may get lost."""
    max_commit_batch: Count = 256
    """Writes that share one commit."""


class BatchesSection(Section):
    """Files and batches: `/v1/files` and `/v1/batches`."""

    max_file_bytes: Bytes = 200 * _MEBIBYTE
    """Of one file that is sent; one of results is as long as the answers are."""
    max_tenant_file_bytes: Bytes = 4 * 1024 * _MEBIBYTE
    """Of all files that one tenant keeps."""
    max_files_per_tenant: Count = 10_000
    """Files that one tenant keeps."""
    keep_file_seconds: Seconds = 30 * 86_400.0
    """How long a file is kept."""
    max_lines: Count = 50_000
    """Of one batch."""
    max_batches_per_tenant: Count = 10_000
    """Batches that one tenant keeps."""
    keep_batch_seconds: Seconds = 30 * 86_400.0
    """How long a batch is kept after its end; its tasks as long as any (`router.tasks.keep_seconds`), and until its
    results are written."""
    max_window_seconds: Seconds = 7 * 86_400.0
    """The longest window that a batch may have."""
    sweep_interval_seconds: Seconds = 300.0
    """How often those that are over are forgotten."""


class BatchEdgeSection(Section):
    """Files and batches at the edge: what callers may send, and how much of it is done at once."""

    max_file_bytes: Bytes = 200 * _MEBIBYTE
    """Of one file that is sent."""
    upload_timeout_seconds: Seconds = 3600.0
    """How long the bytes of a file may take to come in; the pace of `connections` holds besides."""
    max_uploads: Count = 32
    """Files that are taken in at once; one more is refused. Each holds about two pieces of a file in memory."""
    max_lines: Count = 50_000
    """Requests of one batch."""
    max_line_bytes: Bytes = _MEBIBYTE
    """One line of an input file."""
    max_creations: Count = 4
    """Batches that are made at once; one more is refused. Each is work for the processor as long as its file is."""
    max_finishing: Count = 4
    """Batches whose results are written at once; whoever asks for one more finds it finalizing."""
    finish_wait_seconds: Seconds = 1.0
    """How long whoever asks for a batch waits for its results to be written."""
    finish_timeout_seconds: Seconds = 900.0
    """How long the results of one batch may take to be written; then they are begun anew when somebody asks."""
    store_timeout_seconds: Seconds = 30.0
    """How long whoever keeps files and batches may take to answer, and for each piece of a file."""
