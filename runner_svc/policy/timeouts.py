"""The timeouts of an engine and its requests, one profile per runner, and the grace periods of its end."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutProfile:
    """Timeouts in seconds; None: off.

    Progress is a token, a report on prefill, processor time of the engine's process tree, or GPU time. It is never
    bytes on a connection and never an answer of /health.
    """

    connect_seconds: float = 5.0
    """Timeout of a connection to the engine; a failure restarts the engine."""
    headers_seconds: float | None = None
    """Timeout of response headers. None where they come with the first token: a limit would end a long prefill."""
    first_token_seconds: float | None = None
    """Timeout of the first token, however busy the engine is."""
    prefill_liveness_seconds: float | None = 120.0
    """Maximum time without any progress before the first token."""
    idle_stream_seconds: float = 120.0
    """Maximum time without a token after the first one. SSE comments are bytes, not progress."""
    absolute_seconds: float | None = None
    """Maximum time of the whole request, tools included."""
    probe_interval_seconds: float = 1.0
    """Interval of the watchdog's observations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopGraces:
    """Grace periods of the steps of ending a process."""

    first_term_seconds: float = 3.0
    """llama-server hangs on its first SIGTERM when a request is in flight (3 of 4 runs, measured) ..."""
    second_term_seconds: float = 2.0
    """... and ends immediately on the second."""
    kill_seconds: float = 5.0
    """After SIGKILL the kernel only needs time to clean up."""
