"""The loop that lets time pass for the registry."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import structlog

from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.service import start_critical, stop_tasks

if TYPE_CHECKING:
    import asyncio

log = structlog.get_logger("weft.registry")

Sweep = Callable[[], Awaitable[None]]


class Sweeper:
    """Does each of `sweeps` every `interval_seconds` from `start` to `stop`."""

    def __init__(self, sweeps: Sequence[Sweep], clock: Clock, interval_seconds: float) -> None:
        self._sweeps = sweeps
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; the first sweep comes after one interval."""
        self._task = start_critical(self._run(), name="registry-sweeper")

    async def stop(self) -> None:
        """End the loop. Safe to call twice, or when never started."""
        if self._task is not None:
            task, self._task = self._task, None
            await stop_tasks([task])

    async def _run(self) -> None:
        while True:
            await self._clock.sleep(self._interval_seconds)
            for sweep in self._sweeps:
                await _safely(sweep)


async def _safely(sweep: Sweep) -> None:
    # The next round does again what this one could not; a loop that ended would never do it.
    try:
        await sweep()
    except WeftError as error:
        log.error("sweep failed", reason=error.reason.name)  # noqa: TRY400 - the store has logged the cause
    except Exception:
        log.exception("sweep failed unexpectedly")
