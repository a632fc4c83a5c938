"""Watches of the request log: each gets what there is, then each request whose record has changed.

The log marks changed requests by their keys; records are made when a watcher takes them, so of several changes it gets
the newest state, and a request costs nothing where nobody watches.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Protocol, Self

from router_svc.policy.change_buffer import ChangeBuffer, WatchLimits
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

RETRY_AFTER_SECONDS = 1.0


class WatchedLog(Protocol):
    """Port: the log that is watched; see `router_svc.request_log.RequestLog`."""

    def keys(self, tenant: str, ended_limit: int, now: float) -> Sequence[int]:
        """Return the keys of requests under way, the oldest first, then of the last ended ones, the last first."""
        ...

    def attach(self, watch: "RequestWatch") -> None:
        """Mark changes in this watch from now on."""
        ...

    def detach(self, watch: "RequestWatch") -> None:
        """Mark no more changes in this watch; an unknown one is ignored."""
        ...


class RequestWatch:
    """One watcher of requests of one tenant, or of all. Used inside `with`; called from the event loop alone."""

    def __init__(self, log: WatchedLog, tenant: str, ended_limit: int, limits: WatchLimits, clock: Clock) -> None:
        self._log = log
        self.tenant = tenant
        """Whose requests; empty: of any tenant."""
        self._limits = limits
        self._clock = clock
        self._buffer = ChangeBuffer(limits, log.keys(tenant, ended_limit, clock.monotonic()))
        self._woken = asyncio.Event()
        self._error: WeftError | None = None

    def __enter__(self) -> Self:
        self._log.attach(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._log.detach(self)

    def note(self, key: int, tenant: str, *, only_figures: bool) -> None:
        """Mark a changed request; `only_figures`: of its wait alone. Too many that wait end this watch."""
        if (self.tenant and tenant != self.tenant) or self._error is not None:
            return
        buffer = self._buffer
        before = buffer.due_at()
        if not (buffer.note_figures(key) if only_figures else buffer.note(key)):
            # What waits is useless with a gap behind it; the watcher may be stuck in a write for long.
            self._buffer = ChangeBuffer(self._limits)
            self.end(self._lagged())
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

    def _lagged(self) -> WeftError:
        return WeftError(
            Reason.WATCH_LAGGED,
            f"more than {self._limits.max_waiting_changes} changed requests were waiting to be read; watch again",
            retry_after_seconds=RETRY_AFTER_SECONDS,
        )
