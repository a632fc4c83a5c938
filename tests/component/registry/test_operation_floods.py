"""Cancels by the thousand: they wait in one bounded line, and those that change nothing do not wait at all."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from operation_stage import Stage, load, loaded, running_stage

from registry_svc.operations import operations
from registry_svc.operations.audit_log import MAX_ENTRIES_PER_WINDOW
from registry_svc.operations.policy.governance import Refused
from weft.api.operations.v1.operation_pb2 import Operation
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

STORM = 2_000


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with running_stage() as stage:
        yield stage


async def test_cancel_storm_on_one_operation_waits_in_a_bounded_queue(
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
    assert (await stage.end(running)).state == Operation.STATE_CANCELLED
    assert (await stage.events()).count("cancel_requested") == 1


async def test_no_op_cancel_does_not_wait_behind_other_cancels(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.calls.answer("m1", loaded())
    over = await stage.create(load())
    await stage.end(over)
    stage.calls.held["m2"] = asyncio.Event()
    undone = await stage.create(load("m2"))
    await stage.until_heard("load m1 on r1", "load m2 on r1")
    await stage.operations.cancel(undone, "alice")
    monkeypatch.setattr(operations, "MAX_WAITING_WRITES", 0)
    assert (await stage.operations.cancel(over, "storm")).state == Operation.STATE_SUCCEEDED
    assert (await stage.operations.cancel(undone, "storm")).cancel_requested
    with pytest.raises(WeftError, match="wait to be accepted or cancelled"):
        await stage.create(load("m3"))
    stage.calls.held["m2"].set()
    assert (await stage.end(undone)).state == Operation.STATE_CANCELLED


async def test_cancelled_requests_are_logged_individually_up_to_a_limit(stage: Stage) -> None:
    for number in range(MAX_ENTRIES_PER_WINDOW + 5):
        await stage.operations.audit.cancelled(f"req-{number}", "acme", "key:k1")
    await stage.operations.audit.close_window(immediately=True)
    entries, _ = await stage.operations.audit_page(0, 100)
    single, counted = entries[:-1], entries[-1]
    assert {(entry.event, entry.actor, entry.operation) for entry in single} == {("request.cancelled", "key:k1", "")}
    assert len(single) == MAX_ENTRIES_PER_WINDOW
    assert json.loads(single[0].detail) == {"request_id": "req-0", "tenant": "acme"}
    assert counted.event == "request.cancellations_counted"
    detail = json.loads(counted.detail)
    assert (detail["count"], detail["tenants"]) == (5, {"acme": 5})


async def test_many_cancelled_requests_do_not_suppress_a_rejection_entry(stage: Stage) -> None:
    for number in range(MAX_ENTRIES_PER_WINDOW + 1):
        await stage.operations.audit.cancelled(f"req-{number}", "acme", "key:k1")
    await stage.operations.audit.refused(Refused("no token"), load(), "alice")
    entries, _ = await stage.operations.audit_page(0, 100)
    assert entries[-1].event == "operation.refused"
