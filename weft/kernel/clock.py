"""The clock port. Policies take `now` as a value; only loops hold a Clock."""

import asyncio
import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Where loops get time from."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start, never going back: for every duration inside one process."""
        ...

    def utc_now(self) -> datetime:
        """Wall time with zone UTC: only for what is stored, shown or crosses a process boundary."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return once `seconds` have passed on this clock."""
        ...


class SystemClock:
    """The machine's own clock."""

    def monotonic(self) -> float:
        """See Clock.monotonic."""
        return time.monotonic()

    def utc_now(self) -> datetime:
        """See Clock.utc_now."""
        return datetime.now(UTC)

    async def sleep(self, seconds: float) -> None:
        """See Clock.sleep."""
        await asyncio.sleep(seconds)
