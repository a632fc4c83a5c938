"""Watchers get everything, or are told that they did not."""

import asyncio

import pytest
from kit.failures import fails
from kit.refusals import refused
from kit.resources import gone

from registry_svc.watchers import Watchers
from weft.api.registry.v1.registry_service_pb2 import WatchResponse
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason


def batch(first: int, last: int) -> list[WatchResponse]:
    return [WatchResponse(revision=number, change=gone("model", f"m{number}")) for number in range(first, last + 1)]


async def test_watcher_receives_everything_after_its_subscription_and_nothing_before() -> None:
    watchers = Watchers[WatchResponse](max_waiting=10)
    watchers.publish(batch(1, 2))
    with watchers.subscribe() as watcher:
        watchers.publish(batch(3, 4))
        watchers.publish(batch(5, 5))
        assert [(await anext(watcher)).revision for _ in range(3)] == [3, 4, 5]


async def test_full_buffer_ends_the_watcher_with_a_reason_and_frees_the_buffer() -> None:
    watchers = Watchers[WatchResponse](max_waiting=3)
    slow, quick = watchers.subscribe(), watchers.subscribe()
    for number in range(1, 5):
        watchers.publish(batch(number, number))
        assert (await anext(quick)).revision == number
    with refused(Reason.WATCH_LAGGED):
        await anext(slow)
    assert len(watchers) == 1


async def test_exactly_full_buffer_is_still_complete() -> None:
    watchers = Watchers[WatchResponse](max_waiting=3)
    watcher = watchers.subscribe()
    watchers.publish(batch(1, 1))
    watchers.publish(batch(2, 3))
    assert [(await anext(watcher)).revision for _ in range(3)] == [1, 2, 3]


async def test_large_batch_ends_only_lagging_watchers() -> None:
    watchers = Watchers[WatchResponse](max_waiting=3)
    behind = watchers.subscribe()
    watchers.publish(batch(1, 1))
    current = watchers.subscribe()
    watchers.publish(batch(2, 50))
    assert (await anext(current)).revision == 2
    with pytest.raises(WeftError):
        await anext(behind)


async def test_lagged_watcher_stays_ended() -> None:
    watchers = Watchers[WatchResponse](max_waiting=1)
    watcher = watchers.subscribe()
    for number in (1, 2, 3):
        watchers.publish(batch(number, number))
    for _ in range(2):
        with pytest.raises(WeftError):
            await anext(watcher)


async def test_closing_drains_watchers_and_then_reports_the_reason() -> None:
    watchers = Watchers[WatchResponse](max_waiting=3)
    watcher = watchers.subscribe()
    watchers.publish(batch(1, 1))
    watchers.close()
    assert (await anext(watcher)).revision == 1
    with refused(Reason.SHUTTING_DOWN):
        await anext(watcher)


async def test_unsubscribing_ends_a_watcher() -> None:
    watchers = Watchers[WatchResponse](max_waiting=3)
    with watchers.subscribe():
        assert len(watchers) == 1
    assert len(watchers) == 0


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
        with fails(Reason.WATCH_LAGGED, match="watch again"):
            await anext(slow)
        assert len(states) == 1
    assert len(states) == 0


async def test_watcher_beyond_the_limit_is_refused() -> None:
    states = Watchers[int](max_waiting=2, max_watchers=1)
    with states.subscribe(), fails(Reason.TOO_MANY_RESOURCES, match="already watching"):
        states.subscribe()


async def test_watcher_reads_pending_changes_before_the_shutdown_error() -> None:
    states = Watchers[int](max_waiting=2, max_watchers=1)
    with states.subscribe() as watcher:
        states.publish_state("a", 1)
        states.close()
        assert await anext(watcher) == 1
        with fails(Reason.SHUTTING_DOWN):
            await anext(watcher)
