"""An OpenTelemetry collector for tests: it receives spans over HTTP, and fails on demand."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from gzip import decompress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

WAIT_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedSpan:
    """A received span."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    """Empty: the root of its trace."""
    kind: str
    """The protocol's name, such as SPAN_KIND_SERVER."""
    start: int
    end: int
    attributes: Mapping[str, Any]
    is_error: bool
    links: tuple[tuple[str, str], ...]
    """Trace and span ids."""


class OtlpReceiver:
    """The received spans, and how it answers from now on."""

    def __init__(self) -> None:
        self.status = 200
        self.pause_seconds = 0.0
        """Delay of each answer; ended early by `release`."""
        self.url = ""
        self._spans: list[ReceivedSpan] = []
        self._changed = threading.Condition()
        self._released = threading.Event()

    @property
    def spans(self) -> list[ReceivedSpan]:
        """Returns all spans so far, in order of arrival."""
        with self._changed:
            return list(self._spans)

    def of_trace(self, trace_id: str) -> dict[str, ReceivedSpan]:
        """Returns the spans of a trace by name; for equal names, the last one."""
        return {span.name: span for span in self.spans if span.trace_id == trace_id}

    def wait_for(self, condition: Callable[[list[ReceivedSpan]], bool], seconds: float = WAIT_SECONDS) -> None:
        """Waits until `condition` holds for the spans. Raises TimeoutError with their names."""
        with self._changed:
            if not self._changed.wait_for(lambda: condition(self._spans), seconds):
                raise TimeoutError(f"got {[(span.service, span.name) for span in self._spans]}")

    def release(self) -> None:
        """Ends the delays."""
        self._released.set()

    def take(self, body: bytes) -> int:
        """Stores the spans of a request; returns the status of the answer."""
        if self.pause_seconds:
            self._released.wait(self.pause_seconds)
        if self.status != 200:
            return self.status
        request = ExportTraceServiceRequest.FromString(body)
        with self._changed:
            for resource in request.resource_spans:
                service = _values(resource.resource.attributes).get("service.name", "")
                self._spans += [_received(span, service) for scope in resource.scope_spans for span in scope.spans]
            self._changed.notify_all()
        return 200


def _received(span: Span, service: str) -> ReceivedSpan:
    return ReceivedSpan(
        name=span.name,
        service=service,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=Span.SpanKind.Name(span.kind),
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        attributes=_values(span.attributes),
        is_error=span.status.code == Status.STATUS_CODE_ERROR,
        links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


@contextmanager
def running_receiver() -> Iterator[OtlpReceiver]:
    """Runs a collector on a free port during the block."""
    receiver = OtlpReceiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = decompress(body)
            self.send_response(receiver.take(body))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    receiver.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield receiver
    finally:
        receiver.release()
        server.shutdown()
        server.server_close()
        thread.join()
