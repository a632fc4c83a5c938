"""The clock that stands still until a test moves it."""

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING

from weft_testing.fake_clock import FakeClock, let_all_run

if TYPE_CHECKING:
    from weft.kernel.clock import Clock


class Tick:
    """A loop that writes down when it woke."""

    def __init__(self, clock: FakeClock, seconds: float, woke: list[tuple[str, float]], name: str = "") -> None:
        self._clock: Clock = clock
        self._seconds = seconds
        self._woke = woke
        self._name = name
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            await self._clock.sleep(self._seconds)
            self._woke.append((self._name, self._clock.monotonic()))


async def test_time_stands_still_by_itself() -> None:
    clock = FakeClock(monotonic=100.0)
    nap = asyncio.create_task(clock.sleep(0.001))
    await asyncio.sleep(0.01)
    assert not nap.done()
    assert clock.monotonic() == 100.0
    nap.cancel()


async def test_both_clocks_move_together() -> None:
    clock = FakeClock()
    monotonic, utc = clock.monotonic(), clock.utc_now()
    await clock.advance(90.5)
    assert (clock.monotonic() - monotonic, clock.utc_now() - utc) == (90.5, timedelta(seconds=90.5))


async def test_a_loop_wakes_at_each_of_its_due_times_within_one_advance() -> None:
    clock, woke = FakeClock(monotonic=0.0), list[tuple[str, float]]()
    tick = Tick(clock, 5.0, woke)
    await clock.advance(20.0, sleepers=1)
    assert [at for _, at in woke] == [5.0, 10.0, 15.0, 20.0]
    tick.task.cancel()


async def test_sleepers_wake_in_order_of_due_time_and_then_of_falling_asleep() -> None:
    clock, woke = FakeClock(monotonic=0.0), list[tuple[str, float]]()
    ticks = [Tick(clock, 3.0, woke, "three"), Tick(clock, 2.0, woke, "two"), Tick(clock, 6.0, woke, "six")]
    await clock.advance(6.0, sleepers=3)
    assert woke == [("two", 2.0), ("three", 3.0), ("two", 4.0), ("six", 6.0), ("three", 6.0), ("two", 6.0)]
    for tick in ticks:
        tick.task.cancel()


async def test_a_sleeper_that_is_not_due_sleeps_on() -> None:
    clock = FakeClock()
    nap = asyncio.create_task(clock.sleep(10.0))
    await clock.advance(9.999, sleepers=1)
    assert not nap.done()
    await clock.advance(0.001)
    assert nap.done()


async def test_a_cancelled_sleeper_disturbs_nobody() -> None:
    clock = FakeClock()
    gone, stays = asyncio.create_task(clock.sleep(1.0)), asyncio.create_task(clock.sleep(2.0))
    await clock.wait_for_sleepers(2)
    gone.cancel()
    await clock.advance(2.0)
    assert stays.done()
    assert clock.sleepers == 0


async def test_no_time_at_all_is_not_slept() -> None:
    clock = FakeClock()
    before = clock.monotonic()
    await clock.sleep(0.0)
    await clock.sleep(-1.0)
    assert (clock.monotonic(), clock.sleepers) == (before, 0)


async def test_with_sleepers_a_loop_with_slow_real_work_misses_no_round() -> None:
    clock, rounds = FakeClock(), list[float]()

    async def loop() -> None:
        while True:
            await clock.sleep(5.0)
            await asyncio.to_thread(rounds.append, clock.monotonic())

    task = asyncio.create_task(loop())
    await clock.advance(500.0, sleepers=1)
    assert len(rounds) == 100
    task.cancel()


async def test_four_hours_of_five_second_rounds_take_no_real_time() -> None:
    clock, woke = FakeClock(), list[tuple[str, float]]()
    tick = Tick(clock, 5.0, woke)
    async with asyncio.timeout(5.0):
        await clock.advance(4 * 3600.0, sleepers=1)
    assert len(woke) == 2880
    tick.task.cancel()


async def _steps(count: int, taken: list[int]) -> None:
    for _ in range(count):
        await asyncio.sleep(0)
        taken.append(1)


async def test_all_that_can_run_has_run_and_only_what_is_endless_is_cut_off() -> None:
    taken, longer = list[int](), list[int]()
    short, endless = asyncio.create_task(_steps(20, taken)), asyncio.create_task(_steps(1000, longer))
    await let_all_run(30)
    assert len(taken) == 20
    assert 28 <= len(longer) <= 30
    endless.cancel()
    await short


async def test_nothing_is_waited_for_once_nobody_has_anything_to_do() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    for _ in range(100):
        await let_all_run(1_000_000)
    assert loop.time() - began < 5.0, "each took as many rounds as it may"
