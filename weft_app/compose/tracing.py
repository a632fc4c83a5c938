"""Tracing of a process, from the standard `OTEL_*` variables."""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from weft.kernel.telemetry.log import get_logger
from weft.kernel.telemetry.tracing import NO_TRACING, Sampling, Tracing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

log = get_logger("weft.traces")

SLOW_SECONDS_VARIABLE = "WEFT_TRACES_SLOW_SECONDS"
MAX_SLOW_SECONDS = 86_400.0

DEFAULT_MAX_QUEUED = 2048
"""Maximum number of spans waiting for the collector, as in OpenTelemetry's specification."""
MAX_QUEUED = 1_000_000

_QUEUE = "OTEL_BSP_MAX_QUEUE_SIZE"
_SAMPLER = "OTEL_TRACES_SAMPLER"
_EXPORTER = "OTEL_TRACES_EXPORTER"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def tracing_of(environment: Mapping[str, str]) -> Tracing:
    """Returns a process's tracing: none unless an endpoint or another exporter is set.

    As OpenTelemetry's specification demands, invalid values are logged and ignored: telemetry must not break a service.
    """
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return NO_TRACING
    if not environment.get(_EXPORTER) and not any(environment.get(name) for name in _ENDPOINTS):
        return NO_TRACING
    sampling = sampling_of(environment)
    exporter = None if sampling is None else _exporter_of(environment)
    if sampling is None or exporter is None:
        return NO_TRACING
    from weft_app.compose.span_export import SpanExport  # noqa: PLC0415 - it needs the SDK, which takes time to import

    most = int(_number(environment, _QUEUE, DEFAULT_MAX_QUEUED, most=MAX_QUEUED))
    try:
        return SpanExport(exporter, sampling, max_queued=most, named_by_user=bool(environment.get("OTEL_SERVICE_NAME")))
    except ValueError as error:
        log.warning("traces are off: OTEL_BSP_* contradict each other", why=str(error))
        return NO_TRACING


async def close_tracing(tracing: Tracing) -> None:
    """Sends waiting spans, for a limited time."""
    await asyncio.to_thread(tracing.close)


def sampling_of(environment: Mapping[str, str]) -> Sampling | None:
    """Returns the sampling of `OTEL_TRACES_SAMPLER`, by default `parentbased_traceidratio` of 1 %; None: no traces."""
    default = Sampling()
    slow = _number(environment, SLOW_SECONDS_VARIABLE, default.slow_seconds, most=MAX_SLOW_SECONDS)
    ratio = _number(environment, f"{_SAMPLER}_ARG", default.ratio, most=1.0)
    name = environment.get(_SAMPLER, "").strip().lower() or "parentbased_traceidratio"
    follows_parent = name.startswith("parentbased_")
    match name.removeprefix("parentbased_"):
        case "always_on":
            return Sampling(ratio=1.0, follows_parent=follows_parent, slow_seconds=slow)
        case "always_off" if follows_parent:
            return Sampling(ratio=0.0, slow_seconds=slow, records_failures=False)
        case "always_off":
            return None
        case "traceidratio":
            return Sampling(ratio=ratio, follows_parent=follows_parent, slow_seconds=slow)
        case _:
            log.warning("unknown sampler: the default is used", variable=_SAMPLER, value=name[:64])
            return Sampling(slow_seconds=slow)


def _number(environment: Mapping[str, str], name: str, default: float, *, most: float) -> float:
    text = environment.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if 0 <= value <= most:
        return value
    log.warning("not a number in range: the default is used", variable=name, value=text[:64], most=most)
    return default


def _exporter_of(environment: Mapping[str, str]) -> "SpanExporter | None":
    kind = environment.get(_EXPORTER, "").strip().lower() or "otlp"
    if kind == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter  # noqa: PLC0415

        return ConsoleSpanExporter()
    if kind == "otlp":
        return _otlp_exporter(environment)
    if kind != "none":
        log.warning("traces are off: unknown exporter", variable=_EXPORTER, value=kind[:64])
    return None


def _otlp_exporter(environment: Mapping[str, str]) -> "SpanExporter | None":
    """The exporters themselves read the other variables: endpoint, headers, certificates, compression, timeout."""
    protocol = next((environment[name] for name in _PROTOCOLS if environment.get(name)), "http/protobuf").strip()
    try:
        if protocol == "http/protobuf":
            from opentelemetry.exporter.otlp.proto.http import trace_exporter as over_http  # noqa: PLC0415

            return over_http.OTLPSpanExporter()
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as over_grpc  # noqa: PLC0415

            return over_grpc.OTLPSpanExporter()
    except ImportError:
        log.warning("traces are off: their exporter is not installed", protocol=protocol)
        return None
    log.warning("traces are off: unknown protocol", variable=_PROTOCOLS[1], value=protocol[:64])
    return None
