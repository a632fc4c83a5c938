"""The clock that stands still until a test moves it."""

import asyncio

from weft_testing.fake_clock import FakeClock, let_all_run


async def test_cancelled_sleeper_does_not_affect_others() -> None:
    clock = FakeClock()
    gone, stays = asyncio.create_task(clock.sleep(1.0)), asyncio.create_task(clock.sleep(2.0))
    await clock.wait_for_sleepers(2)
    gone.cancel()
    await clock.advance(2.0)
    assert stays.done()
    assert clock.sleepers == 0


async def test_loop_with_slow_real_work_misses_no_round_of_sleepers() -> None:
    clock, rounds = FakeClock(), list[float]()

    async def loop() -> None:
        while True:
            await clock.sleep(5.0)
            await asyncio.to_thread(rounds.append, clock.monotonic())

    task = asyncio.create_task(loop())
    await clock.advance(500.0, sleepers=1)
    assert len(rounds) == 100
    task.cancel()


async def _steps(count: int, taken: list[int]) -> None:
    for _ in range(count):
        await asyncio.sleep(0)
        taken.append(1)


async def test_run_until_idle_runs_everything_and_cuts_off_only_endless_tasks() -> None:
    taken, longer = list[int](), list[int]()
    short, endless = asyncio.create_task(_steps(20, taken)), asyncio.create_task(_steps(1000, longer))
    await let_all_run(30)
    assert len(taken) == 20
    assert 28 <= len(longer) <= 30
    endless.cancel()
    await short
