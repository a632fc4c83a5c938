"""An instance under leases: waited for, kept over crashes, lost, released, and revoked."""

import asyncio

import pytest
from instance_stage import Stage, failure, living, outcome
from kit.failures import fails
from kit.presence import present
from kit.recipes import http_recipe
from stepped_ledger import GIB, WORDS, SteppedLedger

from runner_svc.backend.port import LoadOrder
from runner_svc.instance.instance_settings import SleepSettings
from runner_svc.policy.lifecycle import Command, Phase
from runner_svc.policy.load_options import LoadPlan, LoadSpec
from weft.api.registry.v1.lease_pb2 import DeviceBytes
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Priority

ORDER = LoadOrder(shares=(DeviceBytes(device_index=0, bytes=2 * GIB),), hides_devices=True)


async def test_memory_is_leased_before_the_engine_starts_and_the_wait_is_reported() -> None:
    book = SteppedLedger()
    book.go.clear()
    async with living(book) as stage:
        assert (stage.state, stage.backend.starts) == ((Phase.LOADING, WORDS), 0)
        assert stage.instance.load_stage == "waiting for memory"
        book.go.set()
        await stage.settle()
        assert stage.state == (Phase.READY, "")
        assert stage.backend.orders == [ORDER]
        assert (book.wishes[0].purpose, book.wishes[0].bytes) == ("m", 2 * GIB)


async def test_lease_is_kept_after_a_crash_and_released_on_hibernation() -> None:
    book = SteppedLedger()
    async with living(book) as stage:
        await stage.die()
        assert (stage.instance.phase, stage.backend.starts) == (Phase.READY, 2)
        assert (len(book.wishes), book.released) == (1, [])
        await stage.instance.unload()
        assert book.released == ["lease-1"]
        await stage.instance.wake()
        assert list(book.held) == ["lease-2"]
    assert book.held == {}


async def test_crash_loop_releases_its_lease_and_requests_a_new_one_after_the_backoff() -> None:
    book = SteppedLedger()
    async with living(
        book,
        load_error=WeftError(Reason.SERVER_DIED, "exit code 1"),
        limits={"max_deaths": 2, "first_pause_seconds": 10.0},
    ) as stage:
        assert stage.instance.phase is Phase.CRASH_LOOP
        assert (list(book.held), book.released) == ([], ["lease-1"])
        stage.backend.load_error = None
        await stage.advance(10.0)
        assert (stage.instance.phase, list(book.held)) == (Phase.READY, ["lease-2"])
    assert book.held == {}


async def test_lost_lease_ends_the_backend_immediately_and_it_reloads_under_a_new_one() -> None:
    book = SteppedLedger()
    async with living(book) as stage:
        request = await stage.request()
        book.lose()
        await stage.settle()
        await stage.advance(1.0)
        error = present(await request)
        assert error.reason is Reason.WORKER_RESTARTED
        assert (stage.backend.stops, stage.backend.starts) == (1, 2)
        assert list(book.held) == ["lease-2"]
        assert stage.instance.phase is Phase.READY


async def test_lease_lost_during_a_load_ends_the_load() -> None:
    book = SteppedLedger()
    async with living(book, loads=False) as stage:
        assert stage.backend.starts == 1
        book.lose()
        stage.backend.loaded.set()
        await stage.settle()
        assert (stage.instance.phase, stage.backend.starts, list(book.held)) == (Phase.READY, 2, ["lease-2"])


async def test_no_engine_starts_under_a_possibly_lost_lease() -> None:
    book = SteppedLedger()
    book.is_sure = False
    async with living(book, limits={"max_deaths": 2}) as stage:
        assert (stage.instance.phase, stage.backend.starts) == (Phase.FAILED, 0)
        assert "lease" in stage.instance.detail
        assert book.held == {}


@pytest.mark.parametrize("waits", [True, False], ids=["for-memory", "for-the-engine"])
async def test_load_abandoned_by_its_only_caller_is_cancelled_and_its_memory_released(waits: bool) -> None:
    book = SteppedLedger()
    async with living(book, start_asleep=True) as stage:
        (book.go if waits else stage.backend.loaded).clear()
        load = await stage.begin(stage.instance.load())
        assert stage.instance.phase is Phase.LOADING
        await stage.leave(load)
        assert stage.state == (Phase.HIBERNATING, "")
        assert book.held == {}


async def test_load_with_another_waiter_continues_when_its_caller_leaves() -> None:
    async with living(SteppedLedger(), start_asleep=True) as stage:
        stage.backend.loaded.clear()
        leaves = await stage.begin(stage.instance.load())
        stays = await stage.begin(stage.instance.wake())
        await stage.leave(leaves)
        stage.backend.loaded.set()
        assert await outcome(stays) is None
        assert stage.backend.starts == 1


async def test_stop_while_waiting_for_memory_leaves_no_lease() -> None:
    book = SteppedLedger()
    book.go.clear()
    stage = Stage(book=book)
    await stage.instance.start()
    await stage.settle()
    await stage.instance.stop()
    book.go.set()
    await stage.settle()
    assert (book.held, stage.instance.phase) == ({}, Phase.IDLE)


async def test_other_options_reload_the_model_and_the_next_plain_load_uses_the_configuration() -> None:
    book = SteppedLedger()
    longer = LoadSpec(plan=LoadPlan(parameters={"context_tokens": 4096}))
    async with living(book) as stage:
        assert await stage.instance.load() is True
        assert await stage.instance.load(longer) is False
        assert await stage.instance.load(longer) is True
        assert [wish.bytes for wish in book.wishes] == [2 * GIB, 4 * GIB]
        assert [order.parameters for order in stage.backend.orders if order] == [{}, {"context_tokens": 4096}]
        await stage.die()
        assert stage.instance.plan == longer.plan, "a restart after a crash keeps it"
        await stage.instance.unload()
        await stage.instance.wake()
        assert stage.instance.plan == LoadPlan()
        assert len(book.held) == 1


async def test_concurrent_loads_with_different_options_get_their_own_or_a_later_one() -> None:
    book = SteppedLedger()
    wishes = [LoadSpec(plan=LoadPlan(parameters={"context_tokens": 1024 * number})) for number in range(1, 5)]
    async with living(book, start_asleep=True) as stage:
        loads = [asyncio.create_task(stage.instance.load(wish)) for wish in wishes]
        await stage.settle()
        await asyncio.gather(*loads, return_exceptions=True)
        await stage.settle()
        assert stage.instance.plan == wishes[-1].plan
        assert stage.instance.phase is Phase.READY
        assert len(book.held) == 1


async def test_budget_too_small_error_shows_what_would_fit() -> None:
    async with living(SteppedLedger(), start_asleep=True) as stage:
        with fails(Reason.INSUFFICIENT_MEMORY) as refused:
            await stage.instance.load(LoadSpec(memory_budget_bytes=GIB))
        assert refused.value.message == "m needs 2 GiB and may use 1 GiB; a context of 1024 tokens fits"
        assert stage.instance.phase is Phase.HIBERNATING
        await stage.instance.load(LoadSpec(memory_budget_bytes=2 * GIB))


async def test_idle_model_yields_its_memory() -> None:
    book = SteppedLedger()
    async with living(book) as stage:
        await stage.instance.yield_memory("lease-1", Priority.NORMAL, "llama")
        assert (stage.instance.phase, book.held) == (Phase.HIBERNATING, {})
        await stage.instance.yield_memory("lease-1", Priority.NORMAL, "llama")


async def test_no_request_is_admitted_after_memory_was_promised() -> None:
    async with living(SteppedLedger()) as stage:
        giving = asyncio.create_task(stage.instance.yield_memory("lease-1", Priority.NORMAL, "llama"))
        await asyncio.sleep(0)
        assert stage.instance.phase is Phase.READY, "the life has not noticed yet"
        with fails(Reason.BACKEND_NOT_READY), stage.instance.admit("r1"):
            pass
        assert await outcome(giving) is None


@pytest.mark.parametrize("why", ["works", "pinned", "higher", "loading"])
async def test_model_in_use_keeps_its_memory(why: str) -> None:
    async with living(SteppedLedger()) as stage:
        asked = Priority.NORMAL
        if why == "works":
            await stage.request()
        elif why == "pinned":
            await stage.instance.load(LoadSpec(pin=True))
        elif why == "higher":
            request = await stage.request(priority=Priority.HIGH)
            await stage.leave(request)
        else:
            stage.backend.loaded.clear()
            await stage.die()
        assert (await failure(stage.instance.yield_memory("lease-1", asked, "llama"))).reason is Reason.RESOURCE_IN_USE
        assert stage.instance.memory.grant is not None


async def test_load_memory_is_learned_once() -> None:
    async with living(SteppedLedger()) as stage:
        memory = stage.instance.memory
        for seen in (None, 0, 3 * GIB, 4 * GIB):
            memory.note_memory_seen(seen)
        assert getattr(stage.forecast, "taken") == [(LoadPlan(), 3 * GIB)]  # noqa: B009 - the port does not tell
        assert memory.held_bytes == 4 * GIB


async def test_measured_memory_was_reported_up_to_five_seconds_after_a_load() -> None:
    async with living(SteppedLedger()) as stage:
        assert stage.told[-1] is Phase.READY
        reports = len(stage.told)
        stage.instance.memory.note_memory_seen(3 * GIB)
        stage.instance.memory.note_memory_seen(4 * GIB)
        assert len(stage.told) == reports + 1, "later changes wait for the next report"


async def test_load_does_not_wait_for_a_server_backing_off_after_a_crash() -> None:
    book = SteppedLedger()
    async with living(book, load_error=WeftError(Reason.SERVER_DIED, "exit code 1"), limits={"max_deaths": 1}) as stage:
        assert stage.instance._lifecycle.state.doing is Command.PAUSE
        with pytest.raises(WeftError, match="exit code 1"):
            await stage.instance.load()
        assert stage.instance.plan == LoadPlan()


async def test_model_woken_during_a_load_with_options_is_loaded_with_those_options() -> None:
    other = LoadSpec(plan=LoadPlan(parameters={"context_tokens": 4096}))
    for turns in range(40):
        async with living(SteppedLedger()) as stage:
            load = asyncio.create_task(stage.instance.load(other))
            for _ in range(turns):
                await asyncio.sleep(0)
            wake = await stage.begin(stage.instance.wake())
            await stage.settle()
            await asyncio.gather(load, wake, return_exceptions=True)
            told = present(stage.backend.orders[-1])
            assert (stage.instance.phase, stage.instance.plan.parameters) == (Phase.READY, told.parameters), turns
            assert stage.instance.plan == other.plan, turns


async def test_model_without_accelerator_memory_takes_no_lease_and_hides_devices() -> None:
    book = SteppedLedger()
    account = book
    async with living(account, start_asleep=True) as stage:
        await stage.instance.load(LoadSpec(plan=LoadPlan(parameters={"context_tokens": 0})))
        assert (book.wishes, stage.backend.orders[0]) == ([], LoadOrder(shares=(), parameters={"context_tokens": 0}))


async def test_lease_lost_during_an_unload_ends_the_backend_without_waiting_for_requests_or_recipes() -> None:
    book = SteppedLedger()
    sleep = SleepSettings(after_seconds=1000.0, action=http_recipe(url="http://controller/sleep"))
    async with living(book, drain_seconds=60.0, sleep=sleep) as stage:
        request = await stage.request()
        unload = await stage.begin(stage.instance.unload())
        assert (stage.instance.phase, stage.backend.stops) == (Phase.STOPPING, 0)
        book.lose()
        await stage.settle()
        await stage.clock.advance(1.0)
        assert await outcome(unload) is None
        assert (stage.backend.stops, stage.recipes.done, book.held) == (1, [], {})
        assert await request is not None


async def test_load_during_an_unload_of_the_same_options_is_loaded_with_its_own_options() -> None:
    longer = LoadSpec(plan=LoadPlan(parameters={"context_tokens": 4096}))
    async with living(SteppedLedger(), drain_seconds=60.0) as stage:
        await stage.instance.load(longer)
        request = await stage.request()
        unload = await stage.begin(stage.instance.unload())
        assert (stage.instance.phase, stage.instance.plan) == (Phase.STOPPING, longer.plan)
        load = await stage.begin(stage.instance.load(longer))
        await stage.leave(request)
        assert [await outcome(unload), await outcome(load)] == [None, None]
        assert stage.instance.plan == longer.plan
        last = present(stage.backend.orders[-1])
        assert last.parameters == {"context_tokens": 4096}, "the caller was told that it is loaded so"


async def test_smaller_load_is_tried_immediately_after_the_configured_one_ran_out_of_memory() -> None:
    smaller = LoadSpec(plan=LoadPlan(parameters={"context_tokens": 1024}))
    async with living(SteppedLedger(), start_asleep=True) as stage:
        stage.backend.load_error = WeftError(Reason.OUT_OF_MEMORY, "exit code 1")
        for _ in range(2):
            failed = asyncio.create_task(stage.instance.load())
            assert await outcome(failed) is not None
            assert (stage.instance.phase, stage.backend.starts) == (Phase.FAILED, 1), "the same again is not tried"
        stage.backend.load_error = None
        assert await stage.instance.load(smaller) is False
        assert (stage.instance.phase, stage.instance.plan) == (Phase.READY, smaller.plan)


@pytest.mark.parametrize("dies", [False, True], ids=["at-first", "after-a-crash"])
async def test_failing_load_options_do_not_block_the_configured_model(dies: bool) -> None:
    other, book = LoadSpec(plan=LoadPlan(parameters={"context_tokens": 4096})), SteppedLedger()
    cannot_be = WeftError(Reason.INVALID_ARGUMENT, "cannot be")
    async with living(book) as stage:
        if dies:
            await stage.instance.load(other)
            stage.backend.load_error = cannot_be
            await stage.die()
        else:
            stage.backend.load_error = cannot_be
            await failure(stage.instance.load(other))
        assert (stage.state, stage.instance.plan) == ((Phase.HIBERNATING, "cannot be"), LoadPlan())
        assert book.held == {}
        stage.backend.load_error = None
        await stage.instance.wake()
        assert stage.state == (Phase.READY, "")
