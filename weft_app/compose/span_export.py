"""Export of spans through the OpenTelemetry SDK.

A separate thread sends spans from a bounded queue. If the collector fails or is slow, spans are dropped and counted,
but requests are not affected.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from threading import Lock

from opentelemetry import trace
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from typing_extensions import override

from weft.kernel.log import get_logger
from weft.kernel.tracing import Attribute, AttributeValue, Sampling, ServiceName, Span, SpanCounts, SpanKind, Tracing

log = get_logger("weft.traces")

CLOSE_SECONDS = 2.0
"""Time for sending queued spans when the process ends; the rest is dropped."""
MAX_ATTRIBUTE_CHARS = 256
"""Longer texts, such as a caller's name for a model, are cut."""

_SCOPE = InstrumentationScope("weft", version("weft"))
_SAMPLED = trace.TraceFlags(trace.TraceFlags.SAMPLED)
_OK = trace.Status(trace.StatusCode.UNSET)
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
        self._resources: dict[ServiceName, Resource] = {}

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
        attributes: dict[str, AttributeValue] = {
            name: value[:MAX_ATTRIBUTE_CHARS] if isinstance(value, str) else value
            for name, value in span.attributes.items()
        }
        status = _OK
        if span.error:
            attributes[Attribute.ERROR] = span.error
            status = trace.Status(trace.StatusCode.ERROR, span.error)
        above = None
        if span.parent_id is not None:
            above = _span_context(span.context.trace_id, span.parent_id)
        # Not with a tracer, which takes 100 us per span (measured).
        made = ReadableSpan(
            span.name,
            context=_span_context(span.context.trace_id, span.context.span_id),
            parent=above,
            resource=self._resource(span.service),
            attributes=attributes,
            links=[trace.Link(_span_context(link.trace_id, link.span_id)) for link in span.links],
            kind=_KINDS[span.kind],
            status=status,
            start_time=span.start,
            end_time=max(span.start, span.end),
            instrumentation_scope=_SCOPE,
        )
        self._processor.on_end(made)

    def _resource(self, service: ServiceName) -> Resource:
        found = self._resources.get(service)
        if found is None:
            own = {SERVICE_VERSION: version("weft")}
            if not self._named_by_user:
                own[SERVICE_NAME] = service.value
            found = self._resources[service] = Resource.create(own)
        return found

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
        # The public method waits 30 s, and never returns if a collector accepts and does not answer.
        self._processor._batch_processor.shutdown(int(CLOSE_SECONDS * 1e3))  # noqa: SLF001


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
