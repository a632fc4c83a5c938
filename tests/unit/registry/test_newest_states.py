"""Watchers that receive the newest state of each thing."""

import asyncio

import pytest

from registry_svc.watchers import Watchers
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


async def test_frequently_changed_resource_is_received_once_in_its_newest_state() -> None:
    states = Watchers[int](max_waiting=10, max_watchers=2)
    with states.subscribe() as watcher:
        for each in range(100):
            states.publish_state("a", each)
            states.publish_state("b", -each)
        assert [await anext(watcher), await anext(watcher)] == [99, -99]


async def test_watcher_receives_changes_while_it_waits() -> None:
    states = Watchers[int](max_waiting=10, max_watchers=2)
    with states.subscribe() as watcher:
        following = asyncio.ensure_future(anext(watcher))
        await asyncio.sleep(0)
        states.publish_state("a", 1)
        assert await following == 1


async def test_watcher_with_too_many_unread_changes_is_ended_and_others_continue() -> None:
    states = Watchers[int](max_waiting=2, max_watchers=2)
    with states.subscribe() as slow, states.subscribe() as quick:
        for number, name in enumerate("abc"):
            states.publish_state(name, number)
            assert await anext(quick) == number
        with pytest.raises(WeftError, match="watch again") as lagged:
            await anext(slow)
        assert lagged.value.reason is Reason.WATCH_LAGGED
        assert len(states) == 1
    assert len(states) == 0


async def test_watcher_beyond_the_limit_is_refused() -> None:
    states = Watchers[int](max_waiting=2, max_watchers=1)
    with states.subscribe(), pytest.raises(WeftError, match="already watching") as refused:
        states.subscribe()
    assert refused.value.reason is Reason.TOO_MANY_RESOURCES


async def test_watcher_reads_pending_changes_before_the_shutdown_error() -> None:
    states = Watchers[int](max_waiting=2, max_watchers=1)
    with states.subscribe() as watcher:
        states.publish_state("a", 1)
        states.close()
        assert await anext(watcher) == 1
        with pytest.raises(WeftError) as ended:
            await anext(watcher)
    assert ended.value.reason is Reason.SHUTTING_DOWN
