"""Watchers that receive the newest state of each thing."""

import asyncio

import pytest

from registry_svc.newest_states import NewestStates
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


async def test_frequently_changed_resource_is_received_once_in_its_newest_state() -> None:
    states = NewestStates[int](max_watchers=2, max_waiting=10)
    with states.subscribe() as watcher:
        for each in range(100):
            states.publish("a", each)
            states.publish("b", -each)
        assert [await anext(watcher), await anext(watcher)] == [("a", 99), ("b", -99)]


async def test_watcher_receives_changes_while_it_waits() -> None:
    states = NewestStates[int](max_watchers=2, max_waiting=10)
    with states.subscribe() as watcher:
        following = asyncio.ensure_future(anext(watcher))
        await asyncio.sleep(0)
        states.publish("a", 1)
        assert await following == ("a", 1)


async def test_watcher_with_too_many_unread_changes_is_ended_and_others_continue() -> None:
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


async def test_watcher_beyond_the_limit_is_refused() -> None:
    states = NewestStates[int](max_watchers=1, max_waiting=2)
    with states.subscribe(), pytest.raises(WeftError, match="watch already") as refused:
        states.subscribe()
    assert refused.value.reason is Reason.TOO_MANY_RESOURCES


async def test_watcher_reads_pending_changes_before_the_shutdown_error() -> None:
    states = NewestStates[int](max_watchers=1, max_waiting=2)
    with states.subscribe() as watcher:
        states.publish("a", 1)
        states.close()
        assert await anext(watcher) == ("a", 1)
        with pytest.raises(WeftError) as ended:
            await anext(watcher)
    assert ended.value.reason is Reason.SHUTTING_DOWN
