"""A clock whose time passes only when a test advances it."""

import asyncio
import heapq
from collections.abc import Sized
from datetime import UTC, datetime, timedelta

from typing_extensions import override

from weft.kernel.time.clock import Clock

_START_UTC = datetime(2026, 1, 1, tzinfo=UTC)
# Maximum number of times that control is passed to the event loop after a wake-up. Enough for a task to pass a few
# locks and queues and to sleep again; a task that waits for real I/O needs `sleepers` instead.
_SETTLE_ROUNDS = 50


async def let_all_run(rounds: int = _SETTLE_ROUNDS) -> None:
    """Yields to the event loop until no task can continue without real I/O, at most `rounds` times."""
    ready = _ready_to_run()
    for _ in range(rounds):
        await asyncio.sleep(0)
        if not ready:
            return


def _ready_to_run() -> Sized:
    """Returns the event loop's live queue of callbacks; for a loop without one, a non-empty stand-in."""
    ready: Sized = getattr(asyncio.get_running_loop(), "_ready", (None,))
    return ready


class FakeClock(Clock):
    """A Clock for tests. Time passes only inside `advance`, and sleepers wake in order of their due time."""

    def __init__(self, *, monotonic: float = 1_000.0, utc: datetime = _START_UTC) -> None:
        self._monotonic = monotonic
        self._utc = utc
        self._asleep: list[tuple[float, int, asyncio.Future[None]]] = []
        self._naps = 0
        self._fell_asleep = asyncio.Event()

    @override
    def monotonic(self) -> float:
        return self._monotonic

    @override
    def utc_now(self) -> datetime:
        return self._utc

    @property
    def sleepers(self) -> int:
        """Number of tasks sleeping on this clock."""
        return sum(not future.done() for _, _, future in self._asleep)

    async def sleep(self, seconds: float) -> None:
        """Waits until `advance` has moved time by `seconds`; returns immediately if they are not positive."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._naps += 1
        heapq.heappush(self._asleep, (self._monotonic + seconds, self._naps, future))
        self._fell_asleep.set()
        await future

    async def advance(self, seconds: float, *, sleepers: int = 0) -> None:
        """Advances time by `seconds`, stopping at every due time to wake its sleepers.

        Sleepers with the same due time wake in the order in which they fell asleep, each settled before the next.

        `sleepers`: wait until at least this many tasks sleep before each step and at the end. A loop with real I/O
        between its sleeps then finishes every round before time continues, even on a slow machine.
        """
        end = self._monotonic + seconds
        await self.wait_for_sleepers(sleepers)
        while self._next_due() <= end:
            due, _, future = heapq.heappop(self._asleep)
            self._move_to(due)
            future.set_result(None)
            await self._settle()
            await self.wait_for_sleepers(sleepers)
        self._move_to(end)
        await self._settle()

    def set_wall(self, seconds: float) -> None:
        """Changes the time of day by `seconds`, like setting a clock."""
        self._utc += timedelta(seconds=seconds)

    async def wait_for_sleepers(self, count: int) -> None:
        """Waits until at least `count` tasks sleep."""
        while self.sleepers < count:
            self._fell_asleep.clear()
            await self._fell_asleep.wait()

    def _next_due(self) -> float:
        while self._asleep and self._asleep[0][2].done():
            heapq.heappop(self._asleep)  # cancelled while asleep
        return self._asleep[0][0] if self._asleep else float("inf")

    def _move_to(self, monotonic: float) -> None:
        self._utc += timedelta(seconds=monotonic - self._monotonic)
        self._monotonic = monotonic

    async def _settle(self) -> None:
        naps, ready = self._naps, _ready_to_run()
        for _ in range(_SETTLE_ROUNDS):
            await asyncio.sleep(0)
            if self._naps > naps or not ready:
                return
