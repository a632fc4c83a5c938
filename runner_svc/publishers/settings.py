"""Limits of the publishers of one edge."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherLimits:
    """Every bound of publishers, their tasks and their results."""

    max_sessions: int = 64
    """Maximum number of registered publishers."""
    max_chunk_bytes: int = 262_144
    """Size of one line of a result: one chunk of an answer."""
    max_answer_bytes: int = 67_108_864
    """Size of everything that is posted for one task."""
    heartbeat_interval_seconds: float = 30.0
    """How often a publisher is to send a heartbeat."""
    silence_timeout_seconds: float = 90.0
    """Time without a request of a publisher after which its session ends."""
    reconnect_seconds: float = 5.0
    """Time within which a publisher opens its event stream, at first and after a loss, before its session ends."""
    task_silence_seconds: float = 120.0
    """Time without a line of a task's result after which the task ends with STALL_TIMEOUT."""
    max_models: int = 64
    """Models of one publisher."""
    max_tasks: int = 256
    """Tasks of one publisher that have not ended."""
    max_connections: int = 1024
    """Concurrent connections; one more is closed."""
    max_registration_bytes: int = 262_144
    """Size of a registration."""
    max_waiting_chunks: int = 64
    """Chunks of one task that wait for a slow caller; beyond that the publisher's post waits."""
    open_timeout_seconds: float = 15.0
    """Longest time of a registration."""
