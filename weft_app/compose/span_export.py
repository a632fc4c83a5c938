"""Export of spans through the OpenTelemetry SDK.

Whether a request is recorded is decided before, so only recorded ones pay for the SDK's tracer (100 us per span,
measured). A separate thread sends spans from a bounded queue. If the collector fails or is slow, spans are dropped and
counted, but requests are not affected.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from threading import Lock, Thread

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from typing_extensions import override

from weft.kernel.telemetry.log import get_logger
from weft.kernel.telemetry.tracing import (
    Attribute,
    Sampling,
    ServiceName,
    Span,
    SpanCounts,
    SpanKind,
    TraceContext,
    Tracing,
)

log = get_logger("weft.traces")

CLOSE_SECONDS = 2.0
"""Time for sending queued spans when the process ends; the rest is dropped."""
MAX_ATTRIBUTE_CHARS = 256
"""Longer texts, such as a caller's name for a model, are cut."""

_SAMPLED = trace.TraceFlags(trace.TraceFlags.SAMPLED)
_KINDS = {
    SpanKind.INTERNAL: trace.SpanKind.INTERNAL,
    SpanKind.SERVER: trace.SpanKind.SERVER,
    SpanKind.CLIENT: trace.SpanKind.CLIENT,
}


class SpanExport(Tracing):
    """Tracing with one exporter."""

    def __init__(
        self, exporter: SpanExporter, sampling: Sampling, *, max_queued: int, named_by_user: bool = False
    ) -> None:
        """`max_queued` is the maximum number of queued spans.

        `named_by_user`: `OTEL_SERVICE_NAME` sets the service name. The SDK reads the other variables, for batches,
        attributes and resources. Raises ValueError if they contradict each other.
        """
        super().__init__(sampling)
        self._named_by_user = named_by_user
        self._lock = Lock()
        self._counts = SpanCounts()
        self._queued = 0
        self._max_queued = max_queued
        self._is_failing = False
        # The SDK's exporters log each failed batch; `_sent` only logs the first.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._processor = BatchSpanProcessor(_CountingExporter(exporter, self._sent), max_queue_size=max_queued)
        self._ids = _GivenIds()
        self._tracers: dict[ServiceName, trace.Tracer] = {}

    @property
    @override
    def counts(self) -> SpanCounts:
        with self._lock:
            return replace(self._counts)

    @override
    def record(self, spans: Sequence[Span]) -> None:
        with self._lock:
            room = max(0, self._max_queued - self._queued)
            accepted = spans[:room]
            self._queued += len(accepted)
            self._counts.dropped += len(spans) - len(accepted)
        for span in accepted:
            self._record(span)

    def _record(self, span: Span) -> None:
        above = Context()
        if span.parent_id is not None:
            parent = _span_context(span.context.trace_id, span.parent_id)
            above = trace.set_span_in_context(trace.NonRecordingSpan(parent), above)
        tracer = self._tracer(span.service)
        with self._lock:
            self._ids.following = span.context
            made = tracer.start_span(
                span.name,
                context=above,
                kind=_KINDS[span.kind],
                attributes=span.attributes,
                links=[trace.Link(_span_context(link.trace_id, link.span_id)) for link in span.links],
                start_time=span.start,
            )
        if span.error:
            made.set_attribute(Attribute.ERROR, span.error)
            made.set_status(trace.Status(trace.StatusCode.ERROR, span.error))
        made.end(max(span.start, span.end))

    def _tracer(self, service: ServiceName) -> trace.Tracer:
        """Returns the tracer of a component: each has its resource, and all the same queue."""
        if service not in self._tracers:
            own = {SERVICE_VERSION: version("weft")}
            if not self._named_by_user:
                own[SERVICE_NAME] = service.value
            provider = TracerProvider(
                sampler=ALWAYS_ON,
                resource=Resource.create(own),
                shutdown_on_exit=False,
                id_generator=self._ids,
                span_limits=SpanLimits(max_span_attribute_length=MAX_ATTRIBUTE_CHARS),
            )
            provider.add_span_processor(self._processor)
            self._tracers[service] = provider.get_tracer("weft", version("weft"))
        return self._tracers[service]

    def _sent(self, count: int, has_failed: bool) -> None:
        """Counts a batch, in the exporter's thread."""
        with self._lock:
            self._queued -= count
            self._counts.failed += count * has_failed
            self._counts.exported += count * (not has_failed)
            has_changed, self._is_failing = has_failed is not self._is_failing, has_failed
        if has_changed and has_failed:
            log.warning("the collector takes no spans", spans=count)
        elif has_changed:
            log.info("the collector takes spans again")

    def flush(self) -> None:
        """Sends all queued spans. Blocks until they are sent."""
        self._processor.force_flush()

    @override
    def close(self) -> None:
        # It waits 30 s, and never returns if a collector accepts and does not answer: the process ends without it.
        closing = Thread(target=self._processor.shutdown, name="weft-traces-close", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


class _GivenIds(IdGenerator):
    """Gives the next span the ids that weft has already told to other processes."""

    following: TraceContext

    @override
    def generate_span_id(self) -> int:
        return self.following.span_id

    @override
    def generate_trace_id(self) -> int:
        return self.following.trace_id


class _CountingExporter(SpanExporter):
    """Reports the outcome of each batch."""

    def __init__(self, exporter: SpanExporter, sent: Callable[[int, bool], None]) -> None:
        self._exporter = exporter
        self._sent = sent

    @override
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            self._sent(len(spans), result is not SpanExportResult.SUCCESS)
        return result

    @override
    def shutdown(self) -> None:
        self._exporter.shutdown()


def _span_context(trace_id: int, span_id: int) -> trace.SpanContext:
    return trace.SpanContext(trace_id, span_id, is_remote=False, trace_flags=_SAMPLED)
