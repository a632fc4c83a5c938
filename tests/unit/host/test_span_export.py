"""The export of spans: what arrives, and what a collector that fails costs."""

from collections.abc import Sequence
from threading import Event

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from typing_extensions import override

from weft.kernel.telemetry.tracing import Sampling, ServiceName, Span, SpanCounts, SpanKind, TraceContext
from weft_app.compose.span_export import SpanExport

SAMPLING = Sampling(ratio=1.0)
WAIT_SECONDS = 10.0


class _Collector(SpanExporter):
    """Keeps spans; `result` says how it answers, and it waits for `gate` first."""

    def __init__(self, result: SpanExportResult = SpanExportResult.SUCCESS) -> None:
        self.result = result
        self.spans: list[ReadableSpan] = []
        self.gate = Event()
        self.gate.set()
        self.asked = Event()

    @override
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.asked.set()
        self.gate.wait(WAIT_SECONDS)
        self.spans += spans
        return self.result

    @override
    def shutdown(self) -> None:
        self.gate.set()


def _span(number: int = 1, **changes: object) -> Span:
    values: dict[str, object] = {
        "name": "weft.queue",
        "service": ServiceName.ROUTER,
        "context": TraceContext(7, number, True),
        "parent_id": 5,
        "start": 1_000,
        "end": 2_000,
    }
    return Span(**(values | changes))  # type: ignore[arg-type]


def test_exported_span_has_ids_times_attributes_and_service() -> None:
    collector = _Collector()
    export = SpanExport(collector, SAMPLING, max_queued=512)
    link = TraceContext(9, 4, True)
    export.record(
        [
            _span(3, kind=SpanKind.CLIENT, attributes={"a": 1}, error="server_died", links=(link,)),
            _span(4, parent_id=None, service=ServiceName.RUNNER),
        ]
    )
    export.close()
    first, second = sorted(collector.spans, key=lambda span: span.context.span_id if span.context else 0)
    assert first.context is not None
    assert first.parent is not None
    assert (first.context.trace_id, first.context.span_id, first.parent.span_id) == (7, 3, 5)
    assert (first.start_time, first.end_time, first.kind.name) == (1_000, 2_000, "CLIENT")
    assert dict(first.attributes or {}) == {"a": 1, "error.type": "server_died"}
    assert not first.status.is_ok
    assert [found.context.span_id for found in first.links] == [4]
    assert second.parent is None
    assert second.context is not None
    assert second.context.trace_id == 7
    names = [span.resource.attributes["service.name"] for span in (first, second)]
    assert names == ["weft-router", "weft-runner"]
    assert export.counts == SpanCounts(exported=2)


def test_spans_beyond_the_queue_are_dropped_and_counted_without_blocking() -> None:
    collector = _Collector()
    collector.gate.clear()
    export = SpanExport(collector, SAMPLING, max_queued=512)
    export.record([_span(number) for number in range(1, 513)])
    assert collector.asked.wait(WAIT_SECONDS)
    export.record([_span(600), _span(601)])
    assert export.counts == SpanCounts(dropped=2)
    collector.gate.set()
    export.close()
    assert export.counts == SpanCounts(exported=512, dropped=2)


@pytest.mark.parametrize("how", ["refuses", "raises"])
def test_spans_refused_by_the_collector_are_counted(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    collector = _Collector(SpanExportResult.FAILURE)
    if how == "raises":
        monkeypatch.setattr(collector, "spans", None)
    export = SpanExport(collector, SAMPLING, max_queued=512)
    export.record([_span(), _span(2)])
    export.close()
    assert export.counts == SpanCounts(failed=2)


def test_user_defined_service_name_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "our-mesh")
    collector = _Collector()
    export = SpanExport(collector, SAMPLING, max_queued=512, named_by_user=True)
    export.record([_span()])
    export.close()
    assert collector.spans[0].resource.attributes["service.name"] == "our-mesh"
