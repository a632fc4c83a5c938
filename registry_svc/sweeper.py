"""The loop that lets time pass for the registry."""

from typing import TYPE_CHECKING

import structlog

from registry_svc.expiry import Expiry
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.service import start_task, stop_tasks

if TYPE_CHECKING:
    import asyncio

log = structlog.get_logger("weft.registry")


class Sweeper:
    """Sweeps every `interval_seconds` from `start` to `stop`."""

    def __init__(self, expiry: Expiry, clock: Clock, interval_seconds: float) -> None:
        self._expiry = expiry
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; the first sweep comes after one interval."""
        self._task = start_task(self._run(), name="registry-sweeper")

    async def stop(self) -> None:
        """End the loop. Safe to call twice, or when never started."""
        if self._task is not None:
            task, self._task = self._task, None
            await stop_tasks([task])

    async def _run(self) -> None:
        while True:
            await self._clock.sleep(self._interval_seconds)
            # The next sweep does again what this one could not; a loop that ended would never do it.
            try:
                await self._expiry.sweep()
            except WeftError as error:
                log.error("sweep failed", reason=error.reason.name)  # noqa: TRY400 - the store has logged the cause
            except Exception:
                log.exception("sweep failed unexpectedly")
