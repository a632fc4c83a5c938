"""Timeouts of single awaitables, which set no timer for one that never waits; otherwise as `asyncio.timeout`."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

import pytest

from weft.kernel.time.clock import within

SHORT, LONG = 0.01, 5.0
Work = Callable[[], Coroutine[Any, Any, object]]
_SEEN: ContextVar[str] = ContextVar("seen", default="nothing")


async def _by_asyncio(seconds: float | None, work: Coroutine[Any, Any, object]) -> object:
    async with asyncio.timeout(seconds):
        return await work


async def _at_once() -> str:
    return "done"


async def _fails_at_once() -> None:
    raise ValueError("at once")


async def _after_waits() -> str:
    for _ in range(3):
        await asyncio.sleep(0)
    return "done"


async def _fails_after_a_wait() -> None:
    await asyncio.sleep(0)
    raise ValueError("late")


async def _own_timeout() -> None:
    async with asyncio.timeout(0):
        await asyncio.Event().wait()


async def _failed_future() -> None:
    failed = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(failed.set_exception, KeyError("future"))
    await failed


async def _recovers_from_a_failed_future() -> str:
    with suppress(KeyError):
        await _failed_future()
    await asyncio.sleep(0)
    return "recovered"


async def _never_ends() -> None:
    await asyncio.Event().wait()


async def _cleans_up_slowly() -> None:
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def _returns_when_cancelled() -> str:
    with suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
    return "kept"


async def _fails_when_cancelled() -> None:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        raise ValueError("cancelled") from None


WORK = (
    *(_at_once, _fails_at_once, _after_waits, _fails_after_a_wait, _own_timeout, _failed_future),
    *(_recovers_from_a_failed_future, _never_ends, _cleans_up_slowly, _returns_when_cancelled, _fails_when_cancelled),
)


async def _outcome(call: Coroutine[Any, Any, object], *, cancels: bool) -> tuple[object, ...]:
    """Result, the types of the error, its cause and its context, and the task's count of cancellations."""
    task = asyncio.create_task(call)
    if cancels:
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.wait([task])
    if task.cancelled():
        return ("cancelled", task.cancelling())
    error = task.exception()
    if error is None:
        return (task.result(), task.cancelling())
    return (type(error), str(error), type(error.__cause__), type(error.__context__), task.cancelling())


ENDLESS = WORK[-4:]
CASES = [
    (work, seconds, cancels)
    for work in WORK
    for seconds in (None, LONG, 0.0, -1.0)
    for cancels in (False, True)
    if cancels or work not in ENDLESS or seconds not in (None, LONG)
]
# Only what ends by nothing else: a busy machine takes longer for a turn of the event loop.
CASES += [(work, SHORT, False) for work in ENDLESS]


@pytest.mark.parametrize(("work", "seconds", "cancels"), CASES)
async def test_within_ends_as_asyncio_timeout_does(work: Work, seconds: float | None, *, cancels: bool) -> None:
    found = await _outcome(within(seconds, work()), cancels=cancels)
    assert found == await _outcome(_by_asyncio(seconds, work()), cancels=cancels)


async def test_awaitable_that_never_waits_sets_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[object] = []
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "call_at", lambda when, *_: timers.append(when))
    assert await within(LONG, _at_once()) == "done"
    assert not timers


async def test_awaitable_runs_in_the_task_and_context_of_its_caller() -> None:
    tasks: set[object] = set()

    async def work() -> None:
        tasks.add(asyncio.current_task())
        await asyncio.sleep(0)
        tasks.add(asyncio.current_task())
        _SEEN.set("work")

    await within(LONG, work())
    assert tasks == {asyncio.current_task()}
    assert _SEEN.get() == "work"


async def test_future_is_awaited_too() -> None:
    future = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(future.set_result, 7)
    assert await within(LONG, future) == 7
    assert await within(LONG, future) == 7


async def test_limit_by_a_function_is_asked_for_once_the_awaitable_waits() -> None:
    asked: list[float] = []

    def seconds() -> float:
        asked.append(SHORT)
        return SHORT

    assert await within(seconds, _at_once()) == "done"
    assert not asked
    with pytest.raises(TimeoutError):
        await within(seconds, _never_ends())
    assert asked == [SHORT]
