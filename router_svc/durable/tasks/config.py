"""Every bound of durable tasks."""

from dataclasses import dataclass, field

from weft.dispatch.schema_guard import SchemaLimits

MEBIBYTE = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLimits:
    """Every bound of durable tasks."""

    pending_limit_seconds: float = 3600.0
    """How long a task may wait until it is begun, and after each lost attempt; then it fails."""
    max_attempts: int = 5
    """Attempts that came to nothing after which a task fails."""
    lease_seconds: float = 15.0
    """How long a claim is good without a heartbeat. A third of it is the heartbeat's interval."""
    run_timeout_seconds: float = 3600.0
    """How long one attempt may run."""
    retry_delay_seconds: float = 1.0
    """Pause after a lost attempt; doubles with each ..."""
    max_retry_delay_seconds: float = 60.0
    """... up to this."""
    keep_seconds: float = 7 * 86_400.0
    """How long a task is kept after its end."""
    sweep_interval_seconds: float = 300.0
    """How often those that waited too long are failed, and those that are over are forgotten."""
    sweep_batch: int = 500
    """Tasks that one statement of a sweep changes: others have their turn in between."""
    poll_interval_seconds: float = 5.0
    """How often tasks are looked for that nobody told of."""
    max_running: int = 256
    """Attempts that one router has under way."""
    max_lanes: int = 256
    """Pairs of model and tenant that one router has tasks waiting for slots of at once; the others' turn comes next."""
    offers_per_lane: int = 4
    """Tasks of such a pair that wait for a slot at once."""
    peeked_per_lane: int = 32
    """Tasks of such a pair that are read ahead."""
    max_peeked_bytes: int = 64 * MEBIBYTE
    """Of all tasks that are read ahead."""
    piece_interval_seconds: float = 0.25
    """How often what a running task has said is written ..."""
    watched_piece_interval_seconds: float = 0.05
    """... and where somebody watches it."""
    max_piece_bytes: int = 256 * 1024
    """What is written at the latest."""
    max_spec_bytes: int = 16 * MEBIBYTE
    """Of one task's request, what it brings with it included."""
    max_origin_bytes: int = 12 * MEBIBYTE
    """Of what a submitter wants back."""
    max_result_bytes: int = 64 * MEBIBYTE
    """Of one task's answer."""
    max_open_per_tenant: int = 200_000
    """Tasks of one tenant that are not at their end."""
    max_watches: int = 1024
    """Watchers of tasks at once."""
    watch_poll_seconds: float = 2.0
    """How often a watcher looks by itself: news of another router may get lost."""
    max_commit_batch: int = 256
    """Writes that share one commit."""
    schemas: SchemaLimits = field(default_factory=SchemaLimits)
    """What the JSON schemas of one task may hold: what those of a live request may."""
