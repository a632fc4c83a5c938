"""The clock port, the machine's clock, the mesh's clock, time limits, and tolerances for differing clocks.

Policies take `now` as a value; only loops hold a Clock.
"""

import asyncio
import time
from collections.abc import Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol, TypeVar

from typing_extensions import override

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

T = TypeVar("T")


class Clock(Protocol):
    """The time source of loops."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start, never going back: for every duration inside one process."""
        ...

    def utc_now(self) -> datetime:
        """Wall time with zone UTC: only for what is stored, shown or crosses a process boundary."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return once `seconds` have passed on this clock."""
        ...


class SystemClock(Clock):
    """The machine's own clock."""

    monotonic = staticmethod(time.monotonic)
    """Called some twenty times per request, so without a function around it."""

    @override
    def utc_now(self) -> datetime:
        return datetime.now(UTC)

    @override
    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class MeshClock(Clock):
    """A Clock whose time of day is `clock`'s until the mesh's time is set.

    From then on it follows the monotonic clock, so that a correction of the machine's own clock does not move it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._told: tuple[datetime, float] | None = None

    def set(self, now: datetime) -> None:
        """Sets the mesh's current time: `now` is aware, in UTC."""
        self._told = now, self._clock.monotonic()

    @override
    def monotonic(self) -> float:
        return self._clock.monotonic()

    @override
    def utc_now(self) -> datetime:
        if self._told is None:
            return self._clock.utc_now()
        told, at = self._told
        return told + timedelta(seconds=self._clock.monotonic() - at)

    @override
    async def sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds)


NOTABLE_OFFSET_SECONDS = 5.0
"""Smaller deviations are not reported: synchronised clocks are off by milliseconds."""


def offset_words(seconds: float) -> str:
    """Such as "its clock is 600 s ahead of the mesh's"; `seconds` are negative where it is behind."""
    return f"its clock is {abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'} the mesh's"


def refused_words(seconds: float) -> str:
    """The same for a clock beyond the allowed deviation, with the remedy."""
    return f"{offset_words(seconds)}, more than is allowed; set it right there (NTP)"


def clock_off(runner: str, seconds: float) -> WeftError:
    """The refusal of a request by a runner whose clock is beyond the allowed deviation."""
    return WeftError(
        Reason.CLOCK_OFF,
        f"the runner {runner} takes no requests: {refused_words(seconds)}",
        metadata={"runner": runner, "clock_offset_seconds": f"{seconds:.0f}"},
    )


CLOCK_MARGIN_SECONDS = 5.0
"""Tolerance of stored times: clocks of two machines differ, and are corrected."""


def seconds_ahead(made_at: datetime, now: datetime) -> timedelta:
    """Returns how far in the future an existing thing was created; zero within the margin.

    Its maker's clock was ahead: every moment that was counted from then lies too far off by as much.
    """
    ahead = made_at - now
    return ahead if ahead > timedelta(seconds=CLOCK_MARGIN_SECONDS) else timedelta()


async def within(seconds: float | None, coroutine: Coroutine[Any, Any, T]) -> T:
    """Returns the result of a coroutine. Raises TimeoutError if it takes longer than `seconds`; None: no limit."""
    async with asyncio.timeout(seconds):
        return await coroutine
