"""The level of a process's log while it runs: another one for a bounded time, then the configured one again."""

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
"""How long another level holds unless its caller says."""
MAX_LOG_LEVEL_SECONDS = 14_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentLevel:
    """What is logged."""

    level: str
    until: datetime | None = None
    """When the configured level holds again; None: it does."""


class LogLevel:
    """Changes the level of the log, and changes it back after a time."""

    def __init__(self, threshold: LogThreshold, clock: Clock) -> None:
        self._threshold = threshold
        self._clock = clock
        self._until: datetime | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def current(self) -> CurrentLevel:
        """What is logged now."""
        return CurrentLevel(level=self._threshold.level, until=self._until)

    async def change(self, level: str, seconds: float | None) -> CurrentLevel:
        """Logs from this level on for `seconds`, or DEFAULT_LOG_LEVEL_SECONDS. An empty level: the configured one.

        Raises INVALID_ARGUMENT for an unknown level, and for no time or one above MAX_LOG_LEVEL_SECONDS.
        """
        if level and level not in LEVELS:
            raise invalid_field("level", f"must be one of {', '.join(LEVELS)}")
        wanted = DEFAULT_LOG_LEVEL_SECONDS if seconds is None else seconds
        if not 0 < wanted <= MAX_LOG_LEVEL_SECONDS:
            raise invalid_field("duration", f"must be above 0 and at most {MAX_LOG_LEVEL_SECONDS / 3600:.0f} h")
        await self.stop()
        if level:
            self._threshold.use(level)
            self._until = self._clock.utc_now() + timedelta(seconds=wanted)
            self._task = start_task(self._restore_after(wanted), name="log-level")
        return self.current

    async def stop(self) -> None:
        """Uses the configured level again. Safe to call twice."""
        task, self._task = self._task, None
        if task is not None:
            await stop_tasks([task])
        self._restore()

    def _restore(self) -> None:
        self._until = None
        self._threshold.use(self._threshold.configured)

    async def _restore_after(self, seconds: float) -> None:
        await self._clock.sleep(seconds)
        self._task = None
        self._restore()
        log.warning("log level restored", log_level=self._threshold.level)
