"""A trace collector for tests, and an exporter that sends to it."""

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

from kit.otlp_receiver import OtlpReceiver, ReceivedSpan, running_receiver
from weft.kernel.telemetry.tracing import Sampling
from weft_app.compose.span_export import SpanExport


class Collected:
    """Spans received by a collector."""

    def __init__(self, receiver: OtlpReceiver, tracing: SpanExport) -> None:
        self._receiver = receiver
        self.tracing = tracing

    def all(self) -> list[ReceivedSpan]:
        self.tracing.flush()
        return self._receiver.spans

    def named(self, name: str) -> list[ReceivedSpan]:
        return [span for span in self.all() if span.name == name]

    def below(self, span: ReceivedSpan) -> list[ReceivedSpan]:
        return [each for each in self.all() if each.parent_id == span.span_id]


@contextmanager
def collected(sampling: Sampling) -> Iterator[Collected]:
    """Runs a collector within the block."""
    with running_receiver() as receiver:
        exporter = OTLPSpanExporter(endpoint=f"{receiver.url}/v1/traces")
        export = SpanExport(exporter, sampling, max_queued=512)
        try:
            yield Collected(receiver, export)
        finally:
            export.close()
