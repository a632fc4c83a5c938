"""The loop that forgets files and batches when their time is over."""

from typing import TYPE_CHECKING

import structlog

from router_svc.batches.batch_keeper import BatchKeeper
from router_svc.batches.config import BatchLimits
from router_svc.batches.file_keeper import FileKeeper
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.service import start_restarting, stop_tasks

if TYPE_CHECKING:
    import asyncio

log = structlog.get_logger("weft.router")


class Sweeper:
    """One round when it starts, and one after each interval."""

    def __init__(self, files: FileKeeper, batches: BatchKeeper, limits: BatchLimits, clock: Clock) -> None:
        self._files = files
        self._batches = batches
        self._limits = limits
        self._clock = clock
        self._sweeping: asyncio.Task[None] | None = None

    async def start(self, *, all_broken: bool) -> None:
        """Begin. `all_broken`: see `FileKeeper.sweep`."""
        await self._once(all_broken=all_broken)
        self._sweeping = start_restarting(self._for_ever, name="batch-sweeper", clock=self._clock)

    async def stop(self) -> None:
        """Stop. Safe to call twice."""
        if self._sweeping is not None:
            task, self._sweeping = self._sweeping, None
            await stop_tasks([task])

    async def _for_ever(self) -> None:
        while True:
            await self._clock.sleep(self._limits.sweep_interval_seconds)
            await self._once(all_broken=False)

    async def _once(self, *, all_broken: bool) -> None:
        """Housekeeping: a disk that is full ends no service. The next round does again what this one could not."""
        for keeper, kind in ((self._files, "files"), (self._batches, "batches")):
            try:
                await keeper.sweep(all_broken=all_broken)
            except WeftError as error:
                log.error("not swept", kind=kind, reason=error.reason.name)  # noqa: TRY400 - the cause is logged
