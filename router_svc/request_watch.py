"""Watches of the request log: each gets what there is, then each request whose record has changed.

The log marks changed requests by their keys; records are made when a watcher takes them, so of several changes it gets
the newest state, and a request costs nothing where nobody watches.
"""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress

from router_svc.policy.change_buffer import ChangeBuffer, WatchLimits
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

RETRY_AFTER_SECONDS = 1.0


class RequestWatch:
    """One watcher of requests of one tenant, or of all. Called from the event loop alone."""

    def __init__(self, tenant: str, first: Iterable[int], limits: WatchLimits, clock: Clock) -> None:
        """`tenant`: whose requests; empty: of any tenant. `first`: the keys of what there is."""
        self._tenant = tenant
        self._limits = limits
        self._clock = clock
        self._buffer = ChangeBuffer(limits, first)
        self._woken = asyncio.Event()
        self._error: WeftError | None = None

    def note(self, key: int, tenant: str, *, only_figures: bool) -> None:
        """Mark a changed request; `only_figures`: of its wait alone. Too many that wait end this watch."""
        if (self._tenant and tenant != self._tenant) or self._error is not None:
            return
        buffer = self._buffer
        before = buffer.due_at()
        if not (buffer.note_figures(key) if only_figures else buffer.note(key)):
            # What waits is useless with a gap behind it; the watcher may be stuck in a write for long.
            self._buffer = ChangeBuffer(self._limits)
            most = self._limits.max_waiting_changes
            message = f"more than {most} changed requests were waiting to be read; watch again"
            self.end(WeftError(Reason.WATCH_LAGGED, message, retry_after_seconds=RETRY_AFTER_SECONDS))
        elif before is None or (not only_figures and buffer.due_at() != before):
            self._woken.set()

    def end(self, error: WeftError) -> None:
        """Raise `error` in the watcher, whatever waits for it."""
        self._error = error
        self._woken.set()

    async def take(self) -> tuple[Sequence[int], bool]:
        """Return the keys of the next batch, and whether everything there was at first has been taken by now.

        Raises WATCH_LAGGED or SHUTTING_DOWN.
        """
        while True:
            if self._error is not None:
                raise self._error
            now = self._clock.monotonic()
            was_synced, keys = self._buffer.is_synced, self._buffer.take(now)
            if keys or not was_synced:
                return keys, self._buffer.is_synced
            due = self._buffer.due_at()
            self._woken.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(None if due is None else due - now):
                    await self._woken.wait()
