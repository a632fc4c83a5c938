"""Background tasks stop on request, and their failures are logged."""

import asyncio
from itertools import pairwise

import pytest
from structlog.testing import capture_logs

from weft.kernel.services.service_lifecycle import (
    CRITICAL_TASK,
    FIRST_RESTART_PAUSE_SECONDS,
    MAX_RESTART_PAUSE_SECONDS,
    STEADY_AFTER_SECONDS,
    start_critical,
    start_restarting,
    start_task,
    stop_tasks,
)
from weft_testing.fake_clock import FakeClock


async def _fail() -> None:
    raise ZeroDivisionError("a bug")


async def test_failed_background_task_is_logged_immediately() -> None:
    with capture_logs() as logs:
        task = start_task(_fail(), name="watcher")
        await asyncio.sleep(0.01)
    assert [(line["event"], line["task"], line["log_level"]) for line in logs] == [
        ("background task died", "watcher", "critical")
    ]
    with pytest.raises(ZeroDivisionError):
        await stop_tasks([task])


async def test_stopped_background_task_is_not_logged() -> None:
    with capture_logs() as logs:
        task = start_task(asyncio.sleep(60), name="watcher")
        await stop_tasks([task])
    assert task.cancelled()
    assert logs == []


async def test_failed_critical_task_is_reported_to_the_event_loop() -> None:
    told: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: told.append(context[CRITICAL_TASK]))
    with capture_logs() as logs:
        task = start_critical(_fail(), name="heart")
        await asyncio.wait([task])
        await asyncio.sleep(0)
    assert (told, [line["event"] for line in logs]) == (["heart"], ["background task died"])


async def _await_a_cancelled_call() -> None:
    """As a call of grpc.aio whose channel is closed ends it: nothing has cancelled the task."""
    raise asyncio.CancelledError


async def test_task_ended_by_a_cancelled_call_counts_as_failed() -> None:
    told: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: told.append(context[CRITICAL_TASK]))
    with capture_logs() as logs:
        task = start_critical(_await_a_cancelled_call(), name="heart")
        await asyncio.wait([task])
        await asyncio.sleep(0)
    assert (told, [line["event"] for line in logs]) == (["heart"], ["background task died"])


async def test_loop_ended_by_a_cancelled_call_is_restarted() -> None:
    clock, starts = FakeClock(), list[float]()

    async def work() -> None:
        starts.append(clock.monotonic())
        await _await_a_cancelled_call()

    task = start_restarting(work, name="sweeper", clock=clock)
    while len(starts) < 2:
        await clock.wait_for_sleepers(1)
        await clock.advance(FIRST_RESTART_PAUSE_SECONDS)
    await stop_tasks([task])
    assert task.cancelled()


async def test_failed_loop_is_restarted_with_bounded_growing_backoff() -> None:
    clock, starts = FakeClock(), list[float]()

    async def work() -> None:
        starts.append(clock.monotonic())
        raise ZeroDivisionError("a bug")

    with capture_logs() as logs:
        task = start_restarting(work, name="sweeper", clock=clock)
        while len(starts) < 10:
            await clock.wait_for_sleepers(1)
            await clock.advance(FIRST_RESTART_PAUSE_SECONDS)
    pauses = [later - earlier for earlier, later in pairwise(starts)]
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, *[MAX_RESTART_PAUSE_SECONDS] * 3]
    assert {(line["event"], line["task"]) for line in logs} == {("background task died and is restarted", "sweeper")}
    await stop_tasks([task])


async def test_loop_that_ran_long_is_restarted_after_the_first_backoff() -> None:
    clock, starts = FakeClock(), list[float]()

    async def work() -> None:
        starts.append(clock.monotonic())
        await clock.sleep(STEADY_AFTER_SECONDS if len(starts) == 3 else 0.0)
        raise ZeroDivisionError("a bug")

    task = start_restarting(work, name="sweeper", clock=clock)
    while len(starts) < 4:
        await clock.wait_for_sleepers(1)
        await clock.advance(FIRST_RESTART_PAUSE_SECONDS)
    assert starts[3] - starts[2] == STEADY_AFTER_SECONDS + FIRST_RESTART_PAUSE_SECONDS
    await stop_tasks([task])
