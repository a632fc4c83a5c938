"""Watchers that receive the newest state of each thing."""

import asyncio

import pytest

from registry_svc.newest_states import NewestStates
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


async def test_of_a_thing_that_changed_often_the_newest_state_is_received_once() -> None:
    states = NewestStates[int](max_watchers=2, max_waiting=10)
    with states.subscribe() as watcher:
        for each in range(100):
            states.publish("a", each)
            states.publish("b", -each)
        assert [await anext(watcher), await anext(watcher)] == [("a", 99), ("b", -99)]


async def test_a_watcher_receives_what_comes_while_it_waits() -> None:
    states = NewestStates[int](max_watchers=2, max_waiting=10)
    with states.subscribe() as watcher:
        following = asyncio.ensure_future(anext(watcher))
        await asyncio.sleep(0)
        states.publish("a", 1)
        assert await following == ("a", 1)


async def test_a_watcher_with_too_many_unread_things_is_ended_and_the_others_go_on() -> None:
    states = NewestStates[int](max_watchers=2, max_waiting=2)
    with states.subscribe() as slow, states.subscribe() as quick:
        for name in "abc":
            states.publish(name, 0)
            assert (await anext(quick))[0] == name
        with pytest.raises(WeftError, match="watch again") as lagged:
            await anext(slow)
        assert lagged.value.reason is Reason.WATCH_LAGGED
        assert states.watchers == 1
    assert states.watchers == 0


async def test_one_watcher_too_many_is_refused() -> None:
    states = NewestStates[int](max_watchers=1, max_waiting=2)
    with states.subscribe(), pytest.raises(WeftError, match="watch already") as refused:
        states.subscribe()
    assert refused.value.reason is Reason.TOO_MANY_RESOURCES


async def test_at_the_end_a_watcher_reads_what_waits_and_then_hears_that_the_registry_stops() -> None:
    states = NewestStates[int](max_watchers=1, max_waiting=2)
    with states.subscribe() as watcher:
        states.publish("a", 1)
        states.close()
        assert await anext(watcher) == ("a", 1)
        with pytest.raises(WeftError) as ended:
            await anext(watcher)
    assert ended.value.reason is Reason.SHUTTING_DOWN
