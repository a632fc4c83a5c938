"""How long a runner waits for what: one profile per worker, none of it per request."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutProfile:
    """All in seconds; None is off.

    Progress is a token, a report on prefill, processor time of the engine's process tree, or GPU time. It is never
    bytes on a connection and never an answer of /health.
    """

    connect_seconds: float = 5.0
    """For a connection to the engine; on failure the engine is restarted."""
    headers_seconds: float | None = None
    """For response headers. None where the engine sends them with the first token: a limit would end a long prefill."""
    first_token_seconds: float | None = None
    """For the first token, however busy the engine is."""
    prefill_liveness_seconds: float | None = 120.0
    """Longest time without any progress before the first token."""
    idle_stream_seconds: float = 120.0
    """Longest time without a token once the answer has begun. Comments are bytes, not progress."""
    absolute_seconds: float | None = None
    """For the whole request, tools included."""
    probe_interval_seconds: float = 1.0
    """How often signs of life are looked for."""
