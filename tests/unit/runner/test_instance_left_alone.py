"""Wakes whose callers leave, and reports of a loaded model to the VRAM ledger."""

import asyncio

import pytest
from instance_stage import living, outcome
from stepped_ledger import SteppedLedger

from runner_svc.policy.lifecycle import Phase
from runner_svc.policy.load_options import LoadSpec
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Priority


async def test_wake_waiting_for_memory_is_cancelled_when_its_last_caller_leaves() -> None:
    """It would keep its place in the ledger's queue, before all others on its host."""
    book = SteppedLedger()
    async with living(book, start_asleep=True) as stage:
        book.go.clear()
        first, last = [asyncio.create_task(stage.instance.wake()) for _ in range(2)]
        await stage.settle()
        await stage.leave(first)
        assert stage.instance.phase is Phase.LOADING
        await stage.leave(last)
        assert stage.state == (Phase.HIBERNATING, "")
        book.go.set()
        await stage.settle()
        assert book.held == {}
        await stage.instance.wake()
        assert (stage.instance.phase, stage.backend.starts) == (Phase.READY, 1)


async def test_wake_with_granted_memory_continues_without_callers() -> None:
    book = SteppedLedger()
    async with living(book, start_asleep=True) as stage:
        stage.backend.loaded.clear()
        wake = await stage.begin(stage.instance.wake())
        await stage.leave(wake)
        stage.backend.loaded.set()
        await stage.settle()
        assert stage.instance.phase is Phase.READY


@pytest.mark.parametrize("start_asleep", [True, False])
async def test_memory_request_of_a_load_or_startup_survives_an_abandoned_wake(start_asleep: bool) -> None:
    book = SteppedLedger()
    book.go.clear()
    async with living(book, start_asleep=start_asleep) as stage:
        load = asyncio.create_task(stage.instance.load()) if start_asleep else None
        await stage.settle()
        wake = await stage.begin(stage.instance.wake())
        await stage.leave(wake)
        assert stage.state[0] is Phase.LOADING
        book.go.set()
        await stage.settle()
        assert stage.state == (Phase.READY, "")
        assert load is None or await outcome(load) is None


async def test_pin_changes_are_reported_to_the_ledger_immediately() -> None:
    """Routers use the ledger, where an unpinned model kept its memory until the next renewal."""
    book = SteppedLedger()
    async with living(book) as stage:
        await stage.settle()
        for pin in (True, False):
            before = book.changes
            await stage.instance.load(LoadSpec(pin=pin))
            assert (stage.instance.memory.memory_use().pinned, book.changes) == (pin, before + 1)


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
