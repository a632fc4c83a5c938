"""One call at a time into a library that may hang, without blocking the callers."""

import threading
import time
from collections.abc import Callable

HANG_SECONDS = 10.0
"""Duration after which a call counts as hung."""


class SingleFlightThread:
    """Runs one job at a time in a daemon thread. A hanging job blocks further ones, but no caller."""

    def __init__(self, name: str, monotonic_seconds: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._now = monotonic_seconds
        self._lock = threading.Lock()
        self._since: float | None = None
        self._told_at_end: list[Callable[[], None]] = []

    def is_alive(self) -> bool:
        """Whether a job runs."""
        return self._since is not None

    def is_hung(self) -> bool:
        """Whether a job has run for HANG_SECONDS or longer."""
        since = self._since
        return since is not None and self._now() - since >= HANG_SECONDS

    def start_or_join(self, job: Callable[[], None], on_end: Callable[[], None] | None = None) -> None:
        """Run `job`, which must not raise, unless one runs; have `on_end` called in its thread when it has ended."""
        with self._lock:
            if on_end is not None:
                self._told_at_end.append(on_end)
            if self._since is None:
                self._since = self._now()
                threading.Thread(target=self._run, args=(job,), name=self._name, daemon=True).start()

    def _run(self, job: Callable[[], None]) -> None:
        job()
        with self._lock:
            self._since = None
            told, self._told_at_end = self._told_at_end, []
        for tell in told:
            tell()
