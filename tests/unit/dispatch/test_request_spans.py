"""The spans of a request, from its trace and its receipt."""

from dataclasses import replace
from typing import Any

from weft.api.common.v1 import receipt_pb2, timing_pb2, usage_pb2
from weft.api.router.v1.placement_service_pb2 import Granted
from weft.dispatch.dispatcher import Dispatcher
from weft.dispatch.placement import for_load, in_queue
from weft.dispatch.request_receipt import MAX_WAIT_PERIODS, RequestContext, RequestTrace
from weft.dispatch.request_spans import request_spans
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation
from weft.kernel.telemetry.tracing import Attribute, Sampling, ServiceName, Span, Tracing

CONTEXT = RequestContext(
    request_id="r1",
    tenant="t",
    model="pool",
    operation=Operation.CHAT,
    traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
)
GRANT = Granted(runner="a", runner_incarnation="i", address="x", host="titan", model="m-a", attempt=1)
EPOCH = 1_700_000_000_000_000_000


def _spans(trace: RequestTrace, reason: Reason, *, ended: float, part: receipt_pb2.Receipt | None = None) -> list[Span]:
    receipt = trace.receipt(reason, part, ended)
    return request_spans(trace, receipt, ServiceName.GATEWAY, ended=ended, epoch=EPOCH)


def _of(spans: list[Span], name: str) -> list[tuple[float, float, str]]:
    """Begin, end in seconds and error of the spans of a name."""
    return [((span.start - EPOCH) / 1e9, (span.end - EPOCH) / 1e9, span.error) for span in spans if span.name == name]


def _answered_at_the_second_attempt() -> tuple[RequestTrace, list[Span]]:
    trace = RequestTrace(CONTEXT, arrived=100.0)
    trace.note_waiting(in_queue(1, "slots"), 100.0)
    trace.note_waiting(in_queue(1, "still slots"), 100.5)
    trace.note_waiting(for_load("loads"), 102.0)
    trace.note_grant(GRANT, 105.0)
    trace.note_attempt_failed(WeftError(Reason.SERVER_DIED, ""), 106.0)
    trace.note_grant(Granted(runner="b", model="m-a", attempt=2), 107.0)
    trace.note_first_content(107.5)
    part = receipt_pb2.Receipt(
        usage=usage_pb2.Usage(prompt_tokens=7, completion_tokens=5, cached_prompt_tokens=2),
        engine_timings=timing_pb2.EngineTimings(),
    )
    part.engine_timings.wall_time.FromMilliseconds(900)
    part.engine_timings.prefill_time.FromMilliseconds(300)
    part.engine_timings.decode_time.FromMilliseconds(500)
    return trace, _spans(trace, Reason.UNSPECIFIED, ended=108.0, part=part)


def test_waits_loads_and_attempts_keep_their_times() -> None:
    _, spans = _answered_at_the_second_attempt()
    assert _of(spans, "chat pool") == [(100.0, 108.0, "")]
    assert _of(spans, "weft.queue") == [(100.0, 102.0, "")]
    assert _of(spans, "weft.load") == [(102.0, 105.0, "")]
    assert _of(spans, "weft.attempt") == [(105.0, 106.0, "server_died"), (107.0, 108.0, "")]
    assert _of(spans, "weft.generate") == [(107.1, 108.0, "")]


def test_receipt_names_the_trace_only_if_it_is_recorded() -> None:
    found = []
    nothing: Any = (None, None)
    for tracing in (Tracing(), Tracing(Sampling(ratio=0.0, records_failures=False)), Tracing(Sampling())):
        trace = RequestTrace(replace(CONTEXT, traceparent=CONTEXT.traceparent[:-1] + "0"), arrived=100.0)
        receipt = trace.receipt(Reason.SERVER_DIED, None, 101.0)
        Dispatcher(*nothing, tracing=tracing).record(trace, receipt, 101.0)
        found.append(receipt.trace_id)
    assert found == ["", "", "0af7651916cd43dd8448eb211c80319c"], "failures are recorded by default"


def test_spans_are_one_tree_below_the_gateway_span() -> None:
    trace, spans = _answered_at_the_second_attempt()
    by_id = {span.context.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    assert {span.context.trace_id for span in spans} == {0x0AF7651916CD43DD8448EB211C80319C}
    request = spans[0]
    assert request.parent_id == 0xB7AD6B7169203331
    generation = next(span for span in spans if span.name == "weft.generate")
    assert generation.parent_id == trace.attempts[-1].span_id
    assert generation.context.span_id == trace.attempts[-1].generation_id
    assert all(span.parent_id == request.context.span_id for span in spans[1:] if span is not generation)


def test_tokens_are_only_on_the_request_span_and_engine_times_on_the_generation_span() -> None:
    _, spans = _answered_at_the_second_attempt()
    request, generation = spans[0], spans[-1]
    assert request.attributes["gen_ai.usage.output_tokens"] == 5
    assert request.attributes["gen_ai.usage.cache_read.input_tokens"] == 2
    assert not any("gen_ai.usage" in name for span in spans[1:] for name in span.attributes)
    times = {name.removeprefix("gen_ai.latency."): value for name, value in generation.attributes.items()}
    assert {name: times[name] for name in times if name.startswith(("time_", "e2e"))} == {
        "time_in_queue": 4.0,
        "time_to_first_token": 7.5,
        "e2e": 8.0,
        "time_in_model_prefill": 0.3,
        "time_in_model_decode": 0.5,
        "time_in_model_inference": 0.8,
    }


def test_image_and_audio_work_is_on_the_request_span_if_present() -> None:
    trace = RequestTrace(CONTEXT, arrived=0.0)
    trace.note_grant(GRANT, 1.0)
    part = receipt_pb2.Receipt(usage=usage_pb2.Usage(image_steps=20, image_pixels=262_144, audio_milliseconds=1_500))
    attributes = _spans(trace, Reason.UNSPECIFIED, ended=2.0, part=part)[0].attributes
    work = {name: value for name, value in attributes.items() if name.startswith("weft.usage.")}
    assert work == {
        "weft.usage.image_steps": 20,
        "weft.usage.image_pixels": 262_144,
        "weft.usage.audio_seconds": 1.5,
    }
    _, spans = _answered_at_the_second_attempt()
    assert not any(name.startswith("weft.usage.") for name in spans[0].attributes)


def test_times_missing_from_an_engine_are_omitted() -> None:
    trace = RequestTrace(CONTEXT, arrived=0.0)
    trace.note_grant(GRANT, 1.0)
    part = receipt_pb2.Receipt(engine_timings=timing_pb2.EngineTimings())
    part.engine_timings.wall_time.FromMilliseconds(100)
    generation = _spans(trace, Reason.UNSPECIFIED, ended=2.0, part=part)[-1]
    assert generation.name == "weft.generate"
    assert not {name for name in generation.attributes if "time_in_model" in name or "first_token" in name}


def _generation_of(part: receipt_pb2.Receipt) -> Span:
    trace = RequestTrace(CONTEXT, arrived=0.0)
    trace.note_grant(GRANT, 1.0)
    part.engine_timings.wall_time.FromMilliseconds(100)
    return _spans(trace, Reason.UNSPECIFIED, ended=2.0, part=part)[-1]


def test_device_time_and_energy_are_on_the_engine_span_if_known() -> None:
    part = receipt_pb2.Receipt(device_usage=receipt_pb2.DeviceUsage(energy_millijoules=72_000))
    part.device_usage.device_time.FromMilliseconds(840)
    attributes = _generation_of(part).attributes
    assert (attributes[Attribute.DEVICE_TIME], attributes[Attribute.DEVICE_ENERGY]) == (0.84, 72.0)
    unknown = receipt_pb2.DeviceUsage(gap=receipt_pb2.DeviceUsage.GAP_NOT_SAMPLED)
    attributes = _generation_of(receipt_pb2.Receipt(device_usage=unknown)).attributes
    assert not {Attribute.DEVICE_TIME, Attribute.DEVICE_ENERGY} & set(attributes)


def test_total_time_is_the_sum_of_engine_time_and_outside_time() -> None:
    trace = RequestTrace(CONTEXT, arrived=0.0)
    trace.note_grant(GRANT, 1.0)
    part = receipt_pb2.Receipt()
    part.engine_timings.wall_time.FromMilliseconds(700)
    receipt = trace.receipt(Reason.UNSPECIFIED, part, 2.0)
    timings = receipt.engine_timings
    parts = timings.wall_time.ToMilliseconds(), timings.outside_time.ToMilliseconds()
    assert (*parts, receipt.total_time.ToMilliseconds()) == (700, 1_300, 2_000)
    part.engine_timings.wall_time.FromMilliseconds(2_001)
    contradicted = trace.receipt(Reason.UNSPECIFIED, part, 2.0)
    assert not contradicted.engine_timings.HasField("outside_time")
    unknown = trace.receipt(Reason.UNSPECIFIED, receipt_pb2.Receipt(), 2.0)
    assert not unknown.HasField("engine_timings")


def test_request_that_ends_while_queued_ends_its_wait_and_has_no_attempt() -> None:
    trace = RequestTrace(CONTEXT, arrived=0.0)
    trace.note_waiting(in_queue(3, "slots"), 0.0)
    spans = _spans(trace, Reason.QUEUE_TIMEOUT, ended=30.0)
    assert [span.name for span in spans] == ["chat pool", "weft.queue"]
    assert spans[0].error == "queue_timeout"
    assert _of(spans, "weft.queue") == [(0.0, 30.0, "")]


def test_cancelled_request_has_a_cancelled_span_and_attempt() -> None:
    trace = RequestTrace(CONTEXT, arrived=0.0)
    trace.note_grant(GRANT, 1.0)
    spans = _spans(trace, Reason.CANCELLED, ended=2.0)
    assert [(span.name, span.error) for span in spans] == [("chat pool", "cancelled"), ("weft.attempt", "cancelled")]
    assert spans[0].attributes["weft.outcome"] == "cancelled"


def test_wait_periods_are_bounded_and_cover_the_whole_time() -> None:
    trace = RequestTrace(CONTEXT, arrived=0.0)
    for second in range(100):
        kind = for_load("loads") if second % 2 else in_queue(1, "slots")
        trace.note_waiting(kind, float(second))
    trace.note_grant(GRANT, 100.0)
    assert len(trace.waits) == MAX_WAIT_PERIODS
    assert (trace.waits[0].began, trace.waits[-1].ended) == (0.0, 100.0)
    joins = zip(trace.waits, trace.waits[1:], strict=False)
    assert all(before.ended == after.began for before, after in joins)


def test_requested_name_is_kept_after_an_agent_is_resolved() -> None:
    trace = RequestTrace(replace(CONTEXT, model="agent/reviewer"), arrived=0.0)
    trace.context = replace(trace.context, model="pool", agent="reviewer")
    span = _spans(trace, Reason.UNSPECIFIED, ended=1.0)[0]
    assert span.name == "chat agent/reviewer"
    assert (span.attributes["gen_ai.request.model"], span.attributes["gen_ai.agent.name"]) == (
        "agent/reviewer",
        "reviewer",
    )
