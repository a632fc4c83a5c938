"""Temporary change of a running process's log level."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from weft.kernel.clock import Clock
from weft.kernel.errors import invalid_field
from weft.kernel.log import get_logger
from weft.kernel.log_threshold import LEVELS, LogThreshold
from weft.kernel.service import start_task, stop_tasks

if TYPE_CHECKING:
    import asyncio

log = get_logger("weft.log_level")

DEFAULT_LOG_LEVEL_SECONDS = 600.0
"""How long a change lasts by default."""
MAX_LOG_LEVEL_SECONDS = 14_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentLevel:
    """The log level in use."""

    level: str
    until: datetime | None = None
    """When the configured level is restored; None: it is in use."""


class LogLevel:
    """Changes the log level, and restores the configured one after a time."""

    def __init__(self, threshold: LogThreshold, clock: Clock) -> None:
        self._threshold = threshold
        self._clock = clock
        self._until: datetime | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def current(self) -> CurrentLevel:
        """The level in use, and until when."""
        return CurrentLevel(level=self._threshold.level, until=self._until)

    async def change(self, level: str, seconds: float | None) -> CurrentLevel:
        """Uses a level for `seconds`, by default DEFAULT_LOG_LEVEL_SECONDS; "" restores the configured level.

        Raises INVALID_ARGUMENT for an unknown level, and for a time of 0 or above MAX_LOG_LEVEL_SECONDS.
        """
        if level and level not in LEVELS:
            raise invalid_field("level", f"must be one of {', '.join(LEVELS)}")
        wanted = DEFAULT_LOG_LEVEL_SECONDS if seconds is None else seconds
        if not 0 < wanted <= MAX_LOG_LEVEL_SECONDS:
            raise invalid_field("duration", f"must be above 0 and at most {MAX_LOG_LEVEL_SECONDS / 3600:.0f} h")
        self._restore()
        if level:
            self._threshold.use(level)
            self._until = self._clock.utc_now() + timedelta(seconds=wanted)
            self._task = start_task(self._restore_after(wanted), name="log-level")
        return self.current

    async def stop(self) -> None:
        """Restores the configured level. Idempotent."""
        task = self._task
        self._restore()
        if task is not None:
            await stop_tasks([task])

    def _restore(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._task = self._until = None
        self._threshold.use(self._threshold.configured)

    async def _restore_after(self, seconds: float) -> None:
        await self._clock.sleep(seconds)
        self._task = None
        self._restore()
        log.warning("log level restored", log_level=self._threshold.level)
