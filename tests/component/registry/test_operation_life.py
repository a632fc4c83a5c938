"""What becomes of an operation: done, failed, cancelled, and only one of these."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from google.protobuf import duration_pb2
from operation_stage import LoadResponse, Stage, flush, load, loaded, running_stage, said, unload

from registry_svc.operations.job import MAX_NAMED_MODELS
from registry_svc.operations.live_operations import WATCH_BUFFER
from registry_svc.operations.policy.loads import PoolMember
from registry_svc.operations.runner_presence import LOOK_INTERVAL_SECONDS
from weft.api.operations.v1.operation_pb2 import Operation
from weft.api.runner.v1 import runner_service_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

SUCCEEDED, FAILED, CANCELLED = Operation.STATE_SUCCEEDED, Operation.STATE_FAILED, Operation.STATE_CANCELLED

Scope = runner_service_pb2.FlushCacheRequest


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with running_stage() as stage:
        yield stage


async def test_load_reports_its_stages_and_ends_with_its_duration_and_memory(stage: Stage) -> None:
    operation = await stage.create(load())
    following = asyncio.create_task(stage.views(operation))
    stage.calls.answer("m1", said("waiting for memory"), said("loading", 0.5, eta_seconds=20), loaded(100, 30))
    views = await following
    assert [view.stage for view in views if view.stage][-2:] == ["waiting for memory", "loading"]
    half = next(view for view in views if view.progress == 0.5)
    assert half.eta.seconds == 20
    end = views[-1]
    result = end.result
    assert (end.state, end.runner, list(result.models)) == (SUCCEEDED, "r1", ["m1"])
    assert (result.memory_bytes, result.memory_measured, result.load_time.seconds) == (100, True, 30)
    assert await stage.operations.get(operation) == views[-1]
    assert await stage.events() == ["accepted", "started", "succeeded"]


async def test_load_waiting_for_memory_has_no_eta(stage: Stage) -> None:
    stage.calls.answer("m1", loaded(100, 30))
    await stage.end(await stage.create(load()))
    operation = await stage.create(load(context=64))
    following = asyncio.create_task(stage.views(operation))
    stage.calls.answer("m1", said("waiting for memory"), said("loading"), loaded(100, 30))
    etas = {view.stage: view.eta.seconds for view in await following if view.stage}
    assert (etas["waiting for memory"], etas["loading"]) == (0, 30)


async def test_slow_watcher_gets_the_newest_states_in_order_and_the_end(stage: Stage) -> None:
    operation = await stage.create(load())
    followed = await stage.operations.watch(operation)
    stage.calls.answer("m1", *(said("loading", number / 1000) for number in range(1000)), loaded())
    assert (await stage.end(operation)).state is SUCCEEDED
    views = [view async for view in followed]  # type: ignore[union-attr]
    shares = [view.progress for view in views[:-1]]
    assert len(views) == WATCH_BUFFER
    assert shares == sorted(shares, key=lambda share: share or 0.0)
    assert shares[-1] == 0.999
    assert views[-1].state is SUCCEEDED


async def test_model_to_evict_is_unloaded_first(stage: Stage) -> None:
    stage.calls.answer("m1", loaded())
    end = await stage.end(await stage.create(load(evict="m2")))
    assert stage.calls.heard == ["unload m2 on r1", "load m1 on r1"]
    assert end.result.memory_freed_bytes == 7


async def test_runner_error_is_the_failure_of_the_load(stage: Stage) -> None:
    stage.calls.answer("m1", WeftError(Reason.INSUFFICIENT_MEMORY, "needs 9 GiB, m2 \x1b[31mholds 4"))
    end = await stage.end(await stage.create(load()))
    assert (end.state, Reason(end.reason)) == (FAILED, Reason.INSUFFICIENT_MEMORY)
    assert end.detail == "needs 9 GiB, m2  [31mholds 4"
    assert stage.calls.heard == ["load m1 on r1"]
    assert json.loads((await stage.audit())[-1].detail)["reason"] == "insufficient_memory"


async def test_load_fails_immediately_if_the_runner_is_missing(stage: Stage) -> None:
    stage.directory.lose("r1")
    end = await stage.end(await stage.create(load()))
    assert (end.state, Reason(end.reason), stage.calls.heard) == (FAILED, Reason.NO_RUNNER_AVAILABLE, [])


@pytest.mark.parametrize(("gone", "reason"), [("lost", Reason.WORKER_LOST), ("restarted", Reason.WORKER_RESTARTED)])
async def test_losing_a_relayed_runner_mid_load_ends_the_load(stage: Stage, gone: str, reason: Reason) -> None:
    operation = await stage.create(load())
    await stage.until_heard("load m1 on r1")
    if gone == "lost":
        stage.directory.lose("r1")
    else:
        stage.directory.restart("r1")
    await stage.clock.advance(LOOK_INTERVAL_SECONDS)
    end = await stage.end(operation)
    assert (end.state, Reason(end.reason)) == (FAILED, reason)
    assert stage.calls.heard == ["load m1 on r1", "load m1 stopped"]


async def test_load_is_cancelled_only_after_it_was_stopped_and_unloaded(stage: Stage) -> None:
    operation = await stage.create(load())
    await stage.until_heard("load m1 on r1")
    stage.calls.held["m1"] = asyncio.Event()
    view = await stage.operations.cancel(operation, "bob")
    assert (view.state, view.cancel_requested) == (Operation.STATE_RUNNING, True)
    await stage.until_heard("load m1 on r1", "load m1 stopped", "unload m1 on r1")
    assert (await stage.operations.get(operation)).stage == "cancelling"
    assert await stage.state(operation) == Operation.STATE_RUNNING
    stage.calls.held["m1"].set()
    end = await stage.end(operation)
    assert (end.state, Reason(end.reason), end.detail) == (CANCELLED, Reason.CANCELLED, "")
    assert await stage.events() == ["accepted", "started", "cancel_requested", "cancelled"]
    assert (await stage.audit())[2].actor == "bob"


async def test_queued_operation_is_cancelled_immediately_without_a_runner_call(stage: Stage) -> None:
    first, second = await stage.create(load()), await stage.create(unload())
    await stage.until_heard("load m1 on r1")
    assert (await stage.operations.cancel(second, "bob")).state is CANCELLED
    stage.calls.answer("m1", loaded())
    await stage.end(first)
    assert stage.calls.heard == ["load m1 on r1"]
    of_second = [entry.event for entry in await stage.audit() if entry.operation == second]
    assert of_second == ["operation.accepted", "operation.cancel_requested", "operation.cancelled"]


async def test_runner_lost_during_a_cancel_does_not_block_it(stage: Stage) -> None:
    operation = await stage.create(load())
    await stage.until_heard("load m1 on r1")
    stage.directory.lose("r1")
    await stage.operations.cancel(operation, "bob")
    end = await stage.end(operation)
    assert (end.state, end.detail) == (CANCELLED, "")


async def test_failed_unload_after_a_cancel_is_reported(stage: Stage) -> None:
    operation = await stage.create(load())
    await stage.until_heard("load m1 on r1")
    stage.calls.failures["m1"] = [WeftError(Reason.BACKEND_ERROR, "it is stuck")]
    await stage.operations.cancel(operation, "bob")
    assert (await stage.end(operation)).detail == "could not be unloaded: m1: it is stuck"


async def test_cancelled_unload_finishes_the_step_in_progress(stage: Stage) -> None:
    stage.directory.pools["p"] = [PoolMember(model=name, reachable=True, loaded=True) for name in ("m1", "m2", "m3")]
    stage.calls.held["m1"] = asyncio.Event()
    operation = await stage.create(unload("p"))
    await stage.until_heard("unload m1 on r1")
    await stage.operations.cancel(operation, "bob")
    assert await stage.state(operation) == Operation.STATE_RUNNING
    stage.calls.held["m1"].set()
    assert (await stage.end(operation)).state is CANCELLED
    assert stage.calls.heard == ["unload m1 on r1"]


async def test_operation_that_times_out_is_undone_and_failed() -> None:
    async with running_stage(timeout_seconds=60.0) as stage:
        operation = await stage.create(load())
        await stage.until_heard("load m1 on r1")
        await stage.clock.advance(60.0)
        end = await stage.end(operation)
        assert (end.state, Reason(end.reason)) == (FAILED, Reason.DEADLINE_EXCEEDED)
        assert end.detail == "it took longer than 60 s"
        assert stage.calls.heard == ["load m1 on r1", "load m1 stopped", "unload m1 on r1"]


async def test_evicted_model_counts_as_a_subject_of_the_operation(stage: Stage) -> None:
    first = await stage.create(load("m2"))
    second = await stage.create(load("m1", evict="m2"))
    await stage.until_heard("load m2 on r1")
    stage.calls.answer("m2", loaded())
    stage.calls.answer("m1", loaded())
    await stage.end(first)
    await stage.end(second)
    assert stage.calls.heard == ["load m2 on r1", "unload m2 on r1", "load m1 on r1"]


async def test_concurrent_operations_are_limited() -> None:
    async with running_stage(max_running=1) as stage:
        first, second = await stage.create(load("m1")), await stage.create(load("m3"))
        await stage.until_heard("load m1 on r1")
        assert await stage.state(second) == Operation.STATE_PENDING
        stage.calls.answer("m1", loaded())
        stage.calls.answer("m3", loaded())
        await stage.end(first)
        assert (await stage.end(second)).state is SUCCEEDED


async def test_load_eta_is_learned_from_earlier_loads_across_a_restart(stage: Stage) -> None:
    for seconds in (10, 40, 20):
        stage.calls.answer("m1", loaded(seconds=seconds))
        await stage.end(await stage.create(load()))
    for _ in range(2):
        operation = await stage.create(load())
        view = await stage.until_stage(operation, "asking the runner")
        assert view.eta.seconds == 20
        stage.calls.answer("m1", loaded(was_loaded=True))
        await stage.end(operation)
        await stage.restart()


async def test_pool_load_continues_with_the_next_member_until_the_replica_count_is_reached(stage: Stage) -> None:
    stage.directory.pools["p"] = [
        PoolMember(model="m1", reachable=True, loaded=True),
        PoolMember(model="m2", reachable=True, loaded=False),
        PoolMember(model="m3", reachable=True, loaded=False),
    ]
    stage.calls.answer("m2", WeftError(Reason.INSUFFICIENT_MEMORY, "full"))
    stage.calls.answer("m3", loaded())
    end = await stage.end(await stage.create(load("p", replicas=2)))
    assert stage.calls.heard == ["load m2 on r1", "load m3 on r2"]
    assert list(end.result.models) == ["m1", "m3"]
    stage.directory.pools["p"] = [
        PoolMember(model=name, reachable=True, loaded=True, slots_used=used)
        for name, used in (("m1", 0), ("m2", 3), ("m3", 1))
    ]
    stage.calls.heard.clear()
    await stage.end(await stage.create(load("p", replicas=1)))
    assert stage.calls.heard == ["unload m1 on r1", "unload m3 on r2"]


async def test_pool_load_with_too_few_members_fails_with_the_last_error(stage: Stage) -> None:
    stage.directory.pools["p"] = [PoolMember(model=name, reachable=True, loaded=False) for name in ("m1", "m3")]
    stage.calls.answer("m1", loaded())
    stage.calls.answer("m3", WeftError(Reason.INSUFFICIENT_MEMORY, "full"))
    end = await stage.end(await stage.create(load("p", replicas=2)))
    assert (end.state, Reason(end.reason)) == (FAILED, Reason.INSUFFICIENT_MEMORY)
    assert end.detail == "1 more members could not be loaded; the last: full"


async def test_cancelled_pool_load_unloads_only_what_it_loaded(stage: Stage) -> None:
    stage.directory.pools["p"] = [
        PoolMember(model="m1", reachable=True, loaded=True),
        PoolMember(model="m2", reachable=True, loaded=False),
        PoolMember(model="m3", reachable=True, loaded=False),
    ]
    stage.calls.answer("m1", loaded(was_loaded=True))
    stage.calls.answer("m2", loaded())
    operation = await stage.create(load("p", replicas=3, context=4096))
    await stage.until_heard("load m1 on r1", "load m2 on r1", "load m3 on r2")
    await stage.operations.cancel(operation, "bob")
    assert (await stage.end(operation)).state is CANCELLED
    assert stage.calls.heard[3:] == ["load m3 stopped", "unload m2 on r1", "unload m3 on r2"]


async def test_pool_unload_skips_members_with_lost_runners(stage: Stage) -> None:
    stage.directory.pools["p"] = [PoolMember(model=name, reachable=True, loaded=True) for name in ("m1", "m2", "m3")]
    stage.directory.lose("r2")
    end = await stage.end(await stage.create(unload("p")))
    result = end.result
    assert (list(result.models), result.memory_freed_bytes, result.cache_flushed) == (["m1", "m2"], 14, True)


async def test_result_lists_no_more_models_than_fit_into_a_page(stage: Stage) -> None:
    names = [f"n{number:04}" for number in range(300)]
    stage.directory.models |= dict.fromkeys(names, "r1")
    stage.directory.pools["p"] = [PoolMember(model=name, reachable=True, loaded=True) for name in names]
    end = await stage.end(await stage.create(unload("p")))
    result = end.result
    assert (len(result.models), result.memory_freed_bytes) == (MAX_NAMED_MODELS, 300 * 7)


async def test_full_flush_calls_every_runner_and_sums_the_results(stage: Stage) -> None:
    end = await stage.end(await stage.create(flush(Scope.SCOPE_TENANT, tenant="acme")))
    result = end.result
    assert sorted(stage.calls.heard) == ["flush all on r1", "flush all on r2"]
    assert (stage.calls.requests[0].scope, stage.calls.requests[0].tenant) == (Scope.SCOPE_TENANT, "acme")
    assert (result.entry_count, result.token_count, result.HasField("reusable_bytes")) == (4, 100, False)


async def test_model_flush_calls_only_its_runner(stage: Stage) -> None:
    end = await stage.end(await stage.create(flush(Scope.SCOPE_MODEL, model="m3")))
    assert stage.calls.heard == ["flush m3 on r2"]
    assert (end.runner, list(end.result.models)) == ("r2", ["m3"])


async def test_engine_without_flush_support_is_a_failure_only_if_no_other_supports_it(stage: Stage) -> None:
    cannot = WeftError(Reason.UNSUPPORTED_OPERATION, "cannot")
    stage.calls.failures = {"r1": [cannot]}
    assert (await stage.end(await stage.create(flush(Scope.SCOPE_ALL)))).state is SUCCEEDED
    stage.calls.failures = {"r1": [cannot], "r2": [cannot]}
    end = await stage.end(await stage.create(flush(Scope.SCOPE_ALL)))
    assert (end.state, Reason(end.reason)) == (FAILED, Reason.UNSUPPORTED_OPERATION)


async def test_failed_flush_on_one_runner_fails_the_operation(stage: Stage) -> None:
    stage.calls.failures = {"r1": [WeftError(Reason.WORKER_LOST, "lost")]}
    end = await stage.end(await stage.create(flush(Scope.SCOPE_ALL)))
    assert (end.state, Reason(end.reason)) == (FAILED, Reason.WORKER_LOST)
    assert end.detail == "1 of 2 caches were not flushed; the first: lost"


async def test_flush_that_reached_no_runner_is_a_failure(stage: Stage) -> None:
    first = await stage.create(unload("m2"))
    gone = await stage.create(flush(Scope.SCOPE_MODEL, model="m2"))
    del stage.directory.models["m2"]
    await stage.end(first)
    end = await stage.end(gone)
    assert (end.state, Reason(end.reason)) == (FAILED, Reason.MODEL_NOT_FOUND)
    stage.directory.lose("r1")
    stage.directory.lose("r2")
    end = await stage.end(await stage.create(flush(Scope.SCOPE_ALL)))
    assert (end.state, Reason(end.reason)) == (FAILED, Reason.NO_RUNNER_AVAILABLE)


async def test_model_that_moved_is_loaded_on_its_current_runner(stage: Stage) -> None:
    first, second = await stage.create(unload()), await stage.create(load())
    stage.directory.models["m1"] = "r2"
    stage.calls.answer("m1", loaded())
    await stage.end(first)
    await stage.end(second)
    assert stage.calls.heard[-1] == "load m1 on r2"


MOST, LEAST = 2**63 - 1, -(2**63)


def spoilt(response: LoadResponse, seconds: int) -> LoadResponse:
    """A response with a length of time that no protobuf library makes, and every one reads."""
    duration = duration_pb2.Duration(seconds=seconds, nanos=2**31 - 1)
    if response.HasField("result"):
        response.result.load_time.CopyFrom(duration)
    else:
        response.progress.eta.CopyFrom(duration)
    return response


@pytest.mark.parametrize("seconds", [MOST, LEAST, 10**12])
async def test_out_of_range_time_does_not_break_the_operation_list(stage: Stage, seconds: int) -> None:
    operation = await stage.create(load())
    stage.calls.answer("m1", spoilt(said("far along", 0.5), seconds))
    view = await stage.until_stage(operation, "far along")
    assert view.eta.seconds >= 0
    stage.calls.answer("m1", spoilt(loaded(), seconds))
    end = await stage.end(operation)
    assert end.state == Operation.STATE_SUCCEEDED
    again = await stage.create(load())
    stage.calls.answer("m1", said("loading", 0.5), loaded())
    await stage.end(again)
    assert end.result.load_time.seconds >= 0


@pytest.mark.parametrize("amount", [MOST, LEAST])
async def test_out_of_range_amounts_are_still_summed(stage: Stage, amount: int) -> None:
    stage.directory.pools["p"] = [PoolMember(model=name, reachable=True, loaded=False) for name in ("m1", "m2", "m3")]
    for name in ("m1", "m2", "m3"):
        stage.calls.answer(name, loaded(amount))

    async def freed(*_: Any, **__: Any) -> runner_service_pb2.UnloadResponse:
        return runner_service_pb2.UnloadResponse(memory_freed_bytes=amount)

    async def flushed(*_: Any, **__: Any) -> runner_service_pb2.FlushCacheResponse:
        return runner_service_pb2.FlushCacheResponse(entry_count=amount, token_count=amount, reusable_bytes=amount)

    stage.calls.unload, stage.calls.flush_cache = freed, flushed  # type: ignore[method-assign]
    for action in (load("p", replicas=3), unload("p"), flush(Scope.SCOPE_ALL)):
        end = await stage.end(await stage.create(action))
        assert end.state == Operation.STATE_SUCCEEDED, (action, end.detail)
        result = end.result
        told = (result.memory_bytes, result.memory_freed_bytes, result.entry_count, result.token_count)
        assert min(*told, result.reusable_bytes) >= 0
