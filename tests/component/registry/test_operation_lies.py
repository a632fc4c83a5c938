"""Runners that say impossible figures: the operations of others are told as ever, and this one ends as it did."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from google.protobuf import duration_pb2
from operation_stage import LoadResponse, Stage, flush, load, loaded, running_stage, said, unload

from registry_svc.operations.policy.loads import PoolMember
from weft.api.operations.v1.operation_pb2 import Operation
from weft.api.runner.v1 import runner_service_pb2

MOST, LEAST = 2**63 - 1, -(2**63)
Scope = runner_service_pb2.FlushCacheRequest


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with running_stage() as stage:
        yield stage


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
