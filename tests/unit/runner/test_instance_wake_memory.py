"""Requests of a wake to the VRAM ledger, and its outcome for the caller."""

import asyncio

import pytest
from instance_stage import living
from stepped_ledger import SteppedLedger

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.request import Priority

NEVER = WeftError(Reason.INSUFFICIENT_MEMORY, "needs 99 GiB; host-a has 24 GiB")


async def test_wake_caller_is_told_if_memory_may_become_available_later() -> None:
    """A router keeps requests waiting where it may, and refuses them where there never is enough."""
    book = SteppedLedger()
    later = WeftError(Reason.INSUFFICIENT_MEMORY, "no memory within 60 s", retry_after_seconds=5.0)
    reasons = []
    book.error = later
    async with living(book) as stage:
        for error in (later, NEVER, later):
            book.error = error
            with pytest.raises(WeftError) as told:
                await stage.instance.wake()
            reasons.append(told.value.reason)
    assert reasons == [Reason.INSUFFICIENT_MEMORY, Reason.WAKE_FAILED, Reason.INSUFFICIENT_MEMORY]


async def test_memory_is_requested_with_the_priority_of_the_waiting_request() -> None:
    book = SteppedLedger()
    async with living(book, start_asleep=True) as stage:
        for priority in (Priority.HIGH, Priority.LOW, Priority.HIGH):
            await stage.instance.wake(priority)
            await stage.instance.unload()
        book.go.clear()
        wakes = [asyncio.create_task(stage.instance.wake(priority)) for priority in (Priority.LOW, Priority.NORMAL)]
        await stage.settle()
        book.go.set()
        await asyncio.gather(*wakes)
        await stage.instance.unload()
        await stage.instance.load()
    asked = [Priority.from_wire(wish.priority) for wish in book.wishes]
    assert asked == [Priority.HIGH, Priority.LOW, Priority.HIGH, Priority.NORMAL, Priority.NORMAL]
