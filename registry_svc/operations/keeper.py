"""The loops that let time pass for operations: what is old is forgotten, and the end of the audit log is told."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import structlog

from registry_svc.operations.operations import Operations
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.service import start_critical, stop_tasks

if TYPE_CHECKING:
    import asyncio

log = structlog.get_logger("weft.registry.operations")

HOUSEKEEPING_INTERVAL_SECONDS = 60.0


class Keeper:
    """Keeps house every HOUSEKEEPING_INTERVAL_SECONDS, and tells the head of the log every `head_interval_seconds`."""

    def __init__(self, operations: Operations, clock: Clock, head_interval_seconds: float) -> None:
        self._operations = operations
        self._clock = clock
        self._head_interval_seconds = head_interval_seconds
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin; everything happens for the first time after one interval."""
        self._tasks = [
            start_critical(
                self._every(HOUSEKEEPING_INTERVAL_SECONDS, self._operations.keep_house), name="operations-housekeeping"
            ),
            start_critical(self._every(self._head_interval_seconds, self._tell_head), name="audit-head"),
        ]

    async def stop(self) -> None:
        """End the loops. Safe to call twice, or when never started."""
        tasks, self._tasks = self._tasks, []
        await stop_tasks(tasks)

    async def _tell_head(self) -> None:
        self._operations.audit.tell_head()

    async def _every(self, interval_seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            await self._clock.sleep(interval_seconds)
            # The next round does again what this one could not; a loop that ended would never do it.
            try:
                await work()
            except WeftError as error:
                log.error("housekeeping failed", reason=error.reason.name)  # noqa: TRY400 - the store has logged the cause
            except Exception:
                log.exception("housekeeping failed unexpectedly")
