"""A wake-up of one waiter."""

import asyncio

import pytest

from weft.kernel.wakeup import Wakeup


async def test_a_wake_up_reaches_the_task_that_waits() -> None:
    wakeup = Wakeup()
    waiting = asyncio.create_task(wakeup.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    wakeup.wake()
    wakeup.wake()
    await asyncio.wait_for(waiting, 10.0)


async def test_a_wake_up_before_the_wait_is_not_remembered() -> None:
    wakeup = Wakeup()
    wakeup.wake()
    waiting = asyncio.create_task(wakeup.wait())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    wakeup.wake()
    await waiting


async def test_a_cancelled_wait_leaves_room_for_the_next_one() -> None:
    wakeup = Wakeup()
    waiting = asyncio.create_task(wakeup.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    wakeup.wake()
    again = asyncio.create_task(wakeup.wait())
    await asyncio.sleep(0)
    wakeup.wake()
    await again
