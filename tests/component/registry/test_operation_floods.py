"""Cancels by the thousand: they wait in one bounded line, and those that change nothing do not wait at all."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from operation_stage import Stage, load, loaded, running_stage

from registry_svc.operations import operations
from registry_svc.operations.policy.lifecycle import OperationState
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

STORM = 2_000


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with running_stage() as stage:
        yield stage


async def test_a_storm_of_cancels_of_one_operation_waits_in_a_bounded_line(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "MAX_WAITING_WRITES", 8)
    running = await stage.create(load())
    await stage.until_heard("load m1 on r1")
    storm = [stage.operations.cancel(running, "storm") for _ in range(STORM)]
    answers = await asyncio.gather(*storm, return_exceptions=True)
    refused = [answer.reason for answer in answers if isinstance(answer, WeftError)]
    assert set(refused) == {Reason.QUEUE_FULL}
    assert len(refused) >= STORM - 20
    assert (await stage.end(running)).operation.state is OperationState.CANCELLED
    assert (await stage.events()).count("cancel_requested") == 1


async def test_a_cancel_that_changes_nothing_does_not_wait_behind_those_that_do(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.calls.answer("m1", loaded())
    over = await stage.create(load())
    await stage.end(over)
    stage.calls.held["m2"] = asyncio.Event()
    undone = await stage.create(load("m2"))
    await stage.until_heard("load m1 on r1", "load m2 on r1")
    await stage.operations.cancel(undone, "alice")
    monkeypatch.setattr(operations, "MAX_WAITING_WRITES", 0)
    assert (await stage.operations.cancel(over, "storm")).operation.state is OperationState.SUCCEEDED
    assert (await stage.operations.cancel(undone, "storm")).operation.cancel_requested
    with pytest.raises(WeftError, match="wait to be accepted or cancelled"):
        await stage.create(load("m3"))
    stage.calls.held["m2"].set()
    assert (await stage.end(undone)).operation.state is OperationState.CANCELLED
