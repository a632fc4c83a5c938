"""Limits of durable tasks."""

from dataclasses import dataclass, field

from weft.dispatch.schema_guard import SchemaLimits

MEBIBYTE = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLimits:
    """Limits of durable tasks."""

    pending_limit_seconds: float = 3600.0
    """How long a task may be pending before its start, and after each lost attempt; then it fails."""
    max_attempts: int = 5
    """Failed attempts after which a task fails."""
    lease_seconds: float = 15.0
    """Lease length of a claim. Leases are renewed every third of it."""
    run_timeout_seconds: float = 3600.0
    """Longest run of one attempt."""
    retry_delay_seconds: float = 1.0
    """Pause after a lost attempt; doubles with each ..."""
    max_retry_delay_seconds: float = 60.0
    """... up to this."""
    keep_seconds: float = 7 * 86_400.0
    """How long a task is kept after it ended."""
    sweep_interval_seconds: float = 300.0
    """How often expired tasks are failed and old tasks are purged."""
    sweep_batch: int = 500
    """Tasks that one statement of a sweep changes; other writes run in between."""
    poll_interval_seconds: float = 5.0
    """How often the store is polled for tasks whose event was missed."""
    max_running: int = 256
    """Attempts that one router runs at once."""
    max_lanes: int = 256
    """Lanes (model, tenant and priority class) that one router offers tasks of at once; the others follow in turn."""
    offers_per_lane: int = 4
    """Tasks of one lane that wait for a slot at once."""
    peeked_per_lane: int = 32
    """Tasks of one lane that are read ahead."""
    max_peeked_bytes: int = 64 * MEBIBYTE
    """Bytes of all tasks that are read ahead."""
    piece_interval_seconds: float = 0.25
    """How often the output of a running task is written ..."""
    watched_piece_interval_seconds: float = 0.05
    """... and how often while it has a watcher."""
    max_piece_bytes: int = 256 * 1024
    """Bytes of unwritten output that are written at once."""
    max_spec_bytes: int = 16 * MEBIBYTE
    """Bytes of one task's spec, its origin included."""
    max_origin_bytes: int = 12 * MEBIBYTE
    """Bytes of the origin that a submitter stores with a task."""
    max_result_bytes: int = 64 * MEBIBYTE
    """Bytes of one task's answer."""
    max_open_per_tenant: int = 200_000
    """Tasks of one tenant that are not terminal."""
    max_watches: int = 1024
    """Concurrent watchers of tasks."""
    watch_poll_seconds: float = 2.0
    """How often a watcher polls, because events of another router may be lost."""
    max_commit_batch: int = 256
    """Writes that share one commit."""
    schemas: SchemaLimits = field(default_factory=SchemaLimits)
    """Limits of JSON schemas in a task, the same as for live requests."""
