"""The clock port, the machine's and the mesh's clock, and tolerances for clocks that differ.

Policies take `now` as a value; only loops hold a Clock.
"""

import asyncio
import time
import types
from collections.abc import Awaitable, Callable, Generator
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol, TypeVar

from typing_extensions import override

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

T = TypeVar("T")


class Clock(Protocol):
    """The time source of loops."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start, never going back: for durations within one process."""
        ...

    def utc_now(self) -> datetime:
        """Current time in UTC: only for values that are stored, shown or cross a process boundary."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return once `seconds` have passed on this clock."""
        ...


class SystemClock(Clock):
    """The machine's own clock."""

    monotonic = staticmethod(time.monotonic)
    """Not wrapped in a function, because it is called about twenty times per request."""

    @override
    def utc_now(self) -> datetime:
        return datetime.now(UTC)

    @override
    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class MeshClock(Clock):
    """The mesh's clock; until its time is set, its UTC time is that of `clock`.

    Afterwards it follows the monotonic clock, so that correcting the machine's clock does not move it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last_known: tuple[datetime, float] | None = None

    def set(self, now: datetime) -> None:
        """Sets the mesh's current time, an aware UTC datetime."""
        self._last_known = now, self._clock.monotonic()

    @override
    def monotonic(self) -> float:
        return self._clock.monotonic()

    @override
    def utc_now(self) -> datetime:
        if self._last_known is None:
            return self._clock.utc_now()
        told, at = self._last_known
        return told + timedelta(seconds=self._clock.monotonic() - at)

    @override
    async def sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds)


NOTABLE_OFFSET_SECONDS = 5.0
"""Smaller offsets are not reported: synchronised clocks differ by milliseconds."""


def offset_words(seconds: float) -> str:
    """Returns a text such as "its clock is 600 s ahead of the mesh's"; negative `seconds` mean behind."""
    return f"its clock is {abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'} the mesh's"


def refused_words(seconds: float) -> str:
    """Returns the text for a clock beyond the allowed offset, with the remedy."""
    return f"{offset_words(seconds)}, more than is allowed; set it right there (NTP)"


def clock_off(runner: str, seconds: float) -> WeftError:
    """Returns the error for a request to a runner with a clock beyond the allowed offset."""
    return WeftError(
        Reason.CLOCK_OFF,
        f"the runner {runner} accepts no requests: {refused_words(seconds)}",
        metadata={"runner": runner, "clock_offset_seconds": f"{seconds:.0f}"},
    )


CLOCK_MARGIN_SECONDS = 5.0
"""Tolerance for stored times, because the clocks of two machines differ and are corrected."""


def seconds_ahead(made_at: datetime, now: datetime) -> timedelta:
    """Returns how far a creation time lies in the future; zero within CLOCK_MARGIN_SECONDS.

    The creator's clock was ahead by that much, and so is every deadline that was computed from it.
    """
    ahead = made_at - now
    return ahead if ahead > timedelta(seconds=CLOCK_MARGIN_SECONDS) else timedelta()


async def within(seconds: float | Callable[[], float | None] | None, awaitable: Awaitable[T]) -> T:
    """Returns the result of an awaitable. Raises TimeoutError after `seconds`; None: no limit.

    One that never waits, such as most calls of a router in this process, sets no timer, and calls no `seconds`.
    """
    if seconds is None:
        return await awaitable
    began, started = time.monotonic(), awaitable.__await__()
    try:
        waits_for = started.send(None)
    except StopIteration as end:
        found: T = end.value
        return found
    async with asyncio.timeout(seconds() if callable(seconds) else seconds - (time.monotonic() - began)):
        return await _rest_of(started, waits_for)


@types.coroutine
def _rest_of(started: Generator[Any, Any, T], waits_for: object) -> Generator[Any, Any, T]:
    """Continues what was started and waits."""
    while True:
        thrown: BaseException | None = None
        try:
            yield waits_for
        except BaseException as error:  # noqa: BLE001 - passed on
            thrown = error
        if thrown is None:
            return (yield from started)
        try:
            waits_for = started.throw(thrown)
        except StopIteration as end:
            found: T = end.value
            return found
        finally:
            # Otherwise in a reference cycle with its traceback.
            del thrown


async def wait_for_event(event: asyncio.Event, clock: Clock, seconds: float) -> bool:
    """Waits at most `seconds`; returns whether the event was set."""
    if event.is_set():
        return True
    waiting = asyncio.ensure_future(event.wait())
    sleeping = asyncio.ensure_future(clock.sleep(max(0.0, seconds)))
    try:
        await asyncio.wait((waiting, sleeping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        sleeping.cancel()
    return event.is_set()
