"""Timeouts of an engine and its requests (one profile per runner), and grace periods for stopping processes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutProfile:
    """Timeouts in seconds; None: disabled.

    See `policy/progress.py` for what counts as progress.
    """

    connect_seconds: float = 5.0
    """Timeout for connecting to the engine; a failure restarts the engine."""
    headers_seconds: float | None = None
    """Timeout for response headers. None if they arrive with the first token: a limit would abort a long prefill."""
    first_token_seconds: float | None = None
    """Timeout for the first token, even while the engine is computing."""
    prefill_liveness_seconds: float | None = 120.0
    """Maximum time without any progress before the first token."""
    idle_stream_seconds: float = 120.0
    """Maximum time without a token after the first one. SSE comments are bytes, not progress."""
    absolute_seconds: float | None = None
    """Maximum time of the whole request, including tools."""
    probe_interval_seconds: float = 1.0
    """Interval of the watchdog's observations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopGraces:
    """Grace periods of the steps to stop a process."""

    first_term_seconds: float = 3.0
    """llama-server hangs on its first SIGTERM if a request is running (3 of 4 runs, measured) ..."""
    second_term_seconds: float = 2.0
    """... and exits immediately on the second."""
    kill_seconds: float = 5.0
    """After SIGKILL only the kernel needs time to clean up."""
