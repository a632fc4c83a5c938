"""Which traces are recorded, and the contexts of their spans."""

import pytest
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

from weft.kernel.telemetry.structured_logs import valid_traceparent
from weft.kernel.telemetry.tracing import NO_TRACING, Sampling, TraceContext, begin_trace, span_id_of, trace_id_from

SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = f"{SAMPLED[:-2]}00"


@pytest.mark.parametrize("header", [SAMPLED, UNSAMPLED])
def test_trace_context_round_trips(header: str) -> None:
    assert TraceContext.parse(header).traceparent == header


def test_caller_trace_continues_with_a_new_span_and_the_same_sampling_decision() -> None:
    for header in (SAMPLED, UNSAMPLED):
        context, parent = Sampling(ratio=0.5).begin(header)
        assert parent == TraceContext.parse(header)
        assert (context.trace_id, context.is_sampled) == (parent.trace_id, parent.is_sampled)
        assert context.span_id != parent.span_id


def test_sampler_ignoring_the_parent_decides_by_ratio() -> None:
    assert not Sampling(ratio=0.0, follows_parent=False).begin(SAMPLED)[0].is_sampled
    assert Sampling(ratio=1.0, follows_parent=False).begin(UNSAMPLED)[0].is_sampled


@pytest.mark.parametrize("broken", [None, "", "00-xyz", SAMPLED.replace("0af7", "0AF7x")])
def test_request_without_a_valid_trace_starts_one(broken: str | None) -> None:
    context, parent = Sampling(ratio=1.0).begin(broken)
    assert parent is None
    assert valid_traceparent(context.traceparent) == context.traceparent
    assert context.is_sampled


@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.3, 1.0])
def test_services_with_the_sdk_sampler_choose_the_same_traces(ratio: float) -> None:
    ours, theirs = Sampling(ratio=ratio), TraceIdRatioBased(ratio)
    for number in range(500):
        trace_id = trace_id_from(f"trace-{number}")
        assert ours.chooses(trace_id) == (
            theirs.should_sample(None, trace_id, "x").decision is Decision.RECORD_AND_SAMPLE
        )


def test_failed_and_slow_requests_are_recorded_beside_the_sampled_ones() -> None:
    unsampled = TraceContext(1, 1, False)
    sampling = Sampling(ratio=0.0, slow_seconds=30.0)
    assert not sampling.records(unsampled, has_failed=False, seconds=30.0)
    assert sampling.records(unsampled, has_failed=False, seconds=30.1)
    assert sampling.records(unsampled, has_failed=True, seconds=0.0)
    assert sampling.records(TraceContext(1, 1, True), has_failed=False, seconds=0.0)
    silent = Sampling(ratio=0.0, records_failures=False)
    assert not silent.records(unsampled, has_failed=True, seconds=3600.0)


def test_ids_derived_from_a_name_are_deterministic() -> None:
    assert span_id_of("task-1") == span_id_of("task-1") != span_id_of("task-2")
    assert 0 < span_id_of("task-1") < 1 << 64
    assert 0 < trace_id_from("task-1") < 1 << 128


def test_caller_context_is_forwarded_unchanged_without_tracing() -> None:
    assert begin_trace(NO_TRACING, SAMPLED) == (SAMPLED, None)
    fresh, parent = begin_trace(NO_TRACING, "broken")
    assert parent is None
    assert valid_traceparent(fresh) == fresh
