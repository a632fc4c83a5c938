"""Tracing as the standard variables ask for it."""

import pytest

from weft.kernel.telemetry.tracing import NO_TRACING, Sampling
from weft_app.compose.tracing import sampling_of, tracing_of

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_TRACES_SAMPLER": "always_on"},
        {**ENDPOINT, "OTEL_SDK_DISABLED": "TRUE"},
        {**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"},
        {**ENDPOINT, "OTEL_TRACES_EXPORTER": "zipkin"},
        {**ENDPOINT, "OTEL_TRACES_SAMPLER": "always_off"},
        {**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"},
    ],
)
def test_tracing_is_off_by_default(environment: dict[str, str]) -> None:
    assert tracing_of(environment) is NO_TRACING


@pytest.mark.parametrize("protocol", ["", "http/protobuf", "grpc"])
def test_endpoint_enables_tracing(protocol: str) -> None:
    tracing = tracing_of({**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": protocol})
    try:
        assert tracing.sampling == Sampling()
    finally:
        tracing.close()


@pytest.mark.parametrize(
    ("sampler", "argument", "expected"),
    [
        ("", "", Sampling(ratio=0.01)),
        ("", "0.2", Sampling(ratio=0.2)),
        ("always_on", "", Sampling(ratio=1.0, follows_parent=False)),
        ("traceidratio", "0.5", Sampling(ratio=0.5, follows_parent=False)),
        ("parentbased_always_on", "", Sampling(ratio=1.0)),
        ("parentbased_always_off", "", Sampling(ratio=0.0, records_failures=False)),
        ("always_off", "", None),
        ("no-such-sampler", "", Sampling()),
        ("", "seven", Sampling()),
        ("", "1.5", Sampling()),
        ("", "nan", Sampling()),
    ],
)
def test_sampler_is_read_from_the_standard_variables(sampler: str, argument: str, expected: Sampling | None) -> None:
    assert sampling_of({"OTEL_TRACES_SAMPLER": sampler, "OTEL_TRACES_SAMPLER_ARG": argument}) == expected


def test_slow_request_threshold_is_configurable() -> None:
    found = sampling_of({"WEFT_TRACES_SLOW_SECONDS": "2.5"})
    assert found is not None
    assert found.slow_seconds == 2.5
