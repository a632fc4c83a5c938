import asyncio
import sys

import pytest

from weft.kernel.light_event import LightEvent


async def test_a_light_event_wakes_all_who_wait_and_stays_set_until_it_is_cleared() -> None:
    event = LightEvent()
    waiting = [asyncio.create_task(event.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    event.set()
    assert await asyncio.gather(*waiting) == [True] * 3
    assert await event.wait()
    event.clear()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await event.wait()


async def test_a_waiter_that_gives_up_leaves_a_light_event() -> None:
    event = LightEvent()
    waiting = asyncio.create_task(event.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    event.set()
    assert event.is_set()
    assert list(event._waiters) == []


def test_a_light_event_takes_a_fraction_of_the_memory_of_an_event() -> None:
    light, usual = (sys.getsizeof(event._waiters) for event in (LightEvent(), asyncio.Event()))
    assert light < usual / 5
