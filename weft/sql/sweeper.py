"""The sweeper of a service with a database: periodic purges and corrections of its records."""

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.services.service_lifecycle import start_restarting, stop_tasks
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock

if TYPE_CHECKING:
    import asyncio

log = get_logger("weft.sweeper")

Sweep = Callable[[], Awaitable[None]]
Sweeps = Mapping[str, Sweep]


class Sweeper:
    """Repeats the sweeps of a service; restarts its loop after an unexpected end."""

    def __init__(self, name: str, sweeps: Sweeps, interval_seconds: float, clock: Clock) -> None:
        """`name`: of the loop, for logs."""
        self._name = name
        self._sweeps = sweeps
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._sweeping: asyncio.Task[None] | None = None

    @property
    def is_started(self) -> bool:
        """Whether it was started and not stopped."""
        return self._sweeping is not None

    def start(self, *, immediately: bool = False) -> None:
        """Starts the loop. `immediately`: the first round does not wait for the interval."""

        async def run() -> None:
            if immediately:
                await self.sweep()
            while True:
                await self._clock.sleep(self._interval_seconds)
                await self.sweep()

        self._sweeping = start_restarting(run, name=self._name, clock=self._clock)

    async def sweep(self) -> None:
        """Runs each sweep, as `safely`."""
        for kind, sweep in self._sweeps.items():
            await safely(kind, sweep)

    async def stop(self) -> None:
        """Stops the loop. Safe to call twice."""
        if self._sweeping is not None:
            task, self._sweeping = self._sweeping, None
            await stop_tasks([task])


async def safely(kind: str, sweep: Sweep) -> None:
    """Runs a sweep. A failure, such as a full disk, is only logged; the next round retries."""
    try:
        await sweep()
    except WeftError as error:
        log.error("not swept", kind=kind, reason=error.reason.name)  # noqa: TRY400 - the cause is logged
    except Exception:
        log.exception("not swept unexpectedly", kind=kind)
