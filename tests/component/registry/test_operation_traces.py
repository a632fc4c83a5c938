"""The spans of operations, as a collector gets them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from kit.otlp_receiver import ReceivedSpan
from kit.serving import served
from kit.traces import Collected, collected
from operation_stage import Stage, id_of, load, loaded, running_stage, said, unload

from registry_svc.operations.operation_spans import MAX_STAGES
from registry_svc.operations.servicer import OperationServicer
from weft.api.operations.v1 import operation_service_pb2_grpc
from weft.api.operations.v1.operation_pb2 import Operation
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.tracing import Sampling, TraceContext

CALLER = TraceContext(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, True)
UNSAMPLED = TraceContext(CALLER.trace_id, CALLER.span_id, False)
NO_SHARE = Sampling(ratio=0.0, slow_seconds=300.0)


@asynccontextmanager
async def traced(sampling: Sampling = NO_SHARE) -> AsyncIterator[tuple[Stage, Collected]]:
    with collected(sampling) as spans:
        async with running_stage(tracing=spans.tracing) as stage:
            yield stage, spans


def span_of(spans: Collected, operation: str) -> ReceivedSpan:
    (found,) = [span for span in spans.all() if span.attributes.get("weft.operation.id") == id_of(operation)]
    return found


async def created(stage: Stage, traceparent: str = "") -> str:
    view, _ = await stage.operations.create(stage.asked(load()), traceparent)
    return view.name


async def ended_after(stage: Stage, operation_id: str, seconds: float) -> None:
    """A load that succeeds `seconds` after its runner said that it loads."""
    await stage.until_stage(operation_id, "asking the runner")
    stage.calls.answer("m1", said("loading"))
    await stage.until_stage(operation_id, "loading")
    await stage.clock.advance(seconds)
    stage.calls.answer("m1", loaded())
    await stage.end(operation_id)


async def test_load_span_is_a_child_of_its_caller_and_its_stages_keep_their_times() -> None:
    async with traced() as (stage, spans):
        operation_id = await created(stage, CALLER.traceparent)
        await stage.until_stage(operation_id, "asking the runner")
        await stage.clock.advance(2.0)
        stage.calls.answer("m1", said("waiting for memory"), said("waiting for memory", 0.5))
        await stage.until_stage(operation_id, "waiting for memory")
        await stage.clock.advance(5.0)
        stage.calls.answer("m1", said("loading"))
        await stage.until_stage(operation_id, "loading")
        await stage.clock.advance(11.0)
        stage.calls.answer("m1", loaded())
        await stage.end(operation_id)

        span = span_of(spans, operation_id)
        assert (span.name, span.service, span.is_error) == ("weft.operation", "weft-registry", False)
        assert (span.trace_id, span.parent_id) == (f"{CALLER.trace_id:032x}", f"{CALLER.span_id:016x}")
        assert (span.end - span.start) / 1e9 == pytest.approx(18.0)
        assert {name: value for name, value in span.attributes.items() if name != "weft.operation.id"} == {
            "weft.request.id": "request-1",
            "weft.operation.action": "load",
            "gen_ai.request.model": "m1",
            "weft.runner": "r1",
            "weft.caller": "alice",
            "weft.outcome": "succeeded",
        }
        parts = [
            (each.name, each.attributes.get("weft.operation.stage"), round((each.end - each.start) / 1e9))
            for each in spans.below(span)
        ]
        assert parts == [
            ("weft.queue", None, 0),
            ("weft.operation.stage", "asking the runner", 2),
            ("weft.operation.stage", "waiting for memory", 5),
            ("weft.operation.stage", "loading", 11),
        ]


async def test_failure_is_always_sampled_and_a_quick_success_is_not() -> None:
    async with traced() as (stage, spans):
        stage.calls.answer("m1", loaded())
        fine = await created(stage, UNSAMPLED.traceparent)
        await stage.end(fine)
        stage.calls.answer("m1", WeftError(Reason.INSUFFICIENT_MEMORY, "no room"))
        failed = await created(stage, UNSAMPLED.traceparent)
        await stage.end(failed)
        span = span_of(spans, failed)
        assert span.is_error
        assert (span.attributes["error.type"], span.attributes["weft.outcome"]) == ("insufficient_memory", "failed")
        assert [each for each in spans.all() if each.attributes.get("weft.operation.id") == fine] == []


@pytest.mark.parametrize(("seconds", "recorded"), [(299.0, False), (301.0, True)])
async def test_slow_operation_is_always_sampled(seconds: float, recorded: bool) -> None:
    async with traced() as (stage, spans):
        await ended_after(stage, await created(stage), seconds)
        assert bool(spans.all()) is recorded


async def test_operation_cancelled_before_its_turn_has_a_wait_span_until_its_end() -> None:
    async with traced(Sampling(ratio=1.0)) as (stage, spans):
        first = await created(stage)
        view, _ = await stage.operations.create(stage.asked(unload()))
        await stage.clock.advance(3.0)
        await stage.operations.cancel(view.name, "bob")
        stage.calls.answer("m1", loaded())
        await stage.end(first)
        span = span_of(spans, view.name)
        (queue,) = spans.below(span)
        assert (span.attributes["error.type"], span.attributes["weft.outcome"]) == ("cancelled", "cancelled")
        assert (queue.name, queue.start, queue.end) == ("weft.queue", span.start, span.end)
        assert (span.end - span.start) / 1e9 == pytest.approx(3.0)


async def test_operation_resumed_after_a_restart_starts_a_new_trace() -> None:
    async with traced(Sampling(ratio=1.0)) as (stage, spans):
        operation_id = await created(stage, CALLER.traceparent)
        await stage.until_stage(operation_id, "asking the runner")
        await stage.clock.advance(4.0)
        await stage.restart()
        stage.calls.answer("m1", loaded())
        assert (await stage.end(operation_id)).state == Operation.STATE_SUCCEEDED
        span = span_of(spans, operation_id)
        assert span.parent_id == ""
        assert span.trace_id != f"{CALLER.trace_id:032x}"
        assert (span.end - span.start) / 1e9 == pytest.approx(4.0)


async def test_number_of_stage_spans_is_limited() -> None:
    async with traced(Sampling(ratio=1.0)) as (stage, spans):
        stage.calls.answer("m1", *(said(f"stage {number}") for number in range(MAX_STAGES + 5)), loaded())
        operation_id = await created(stage)
        await stage.end(operation_id)
        named = [each for each in spans.below(span_of(spans, operation_id)) if each.name == "weft.operation.stage"]
        assert len(named) == MAX_STAGES


async def test_caller_span_is_read_from_the_call_metadata(tmp_path: Path) -> None:
    async with traced() as (stage, spans):
        service = operation_service_pb2_grpc.add_OperationServiceServicer_to_server, OperationServicer(stage.operations)
        ids = []
        async with served(tmp_path / "registry.sock", service) as channel:
            stub: Any = operation_service_pb2_grpc.OperationServiceStub(channel)
            for model, traceparent in (("m1", CALLER.traceparent), ("m2", "nonsense")):
                stage.calls.answer(model, loaded())
                asked = stage.asked(load(model))
                answer = await stub.CreateOperation(asked, metadata=(("traceparent", traceparent),))
                ids.append(answer.operation.name)
                await stage.end(ids[-1])
        assert span_of(spans, ids[0]).parent_id == f"{CALLER.span_id:016x}"
        assert [each for each in spans.all() if each.attributes.get("weft.operation.id") == id_of(ids[1])] == []
