"""The spans of calls of the public gRPC API."""

from collections.abc import Mapping
from dataclasses import dataclass

from weft.api.common.v1 import receipt_pb2
from weft.kernel.clock import Clock
from weft.kernel.reasons import Reason
from weft.kernel.telemetry import TRACEPARENT
from weft.kernel.tracing import NO_TRACING, Attribute, ServiceName, Span, SpanKind, TraceContext, Tracing, begin_trace

_FAILURES = frozenset({receipt_pb2.OUTCOME_FAILED, receipt_pb2.OUTCOME_REJECTED})


@dataclass(frozen=True, slots=True)
class CallTrace:
    """The place of a call in a trace."""

    traceparent: str
    """The trace context of what the call causes."""
    parent: TraceContext | None
    """The span of its caller; None: it stated none."""
    began: float
    """Seconds on the monotonic clock."""


class CallSpans:
    """Begins the trace of each call, and records its span if the trace is recorded."""

    def __init__(self, clock: Clock, tracing: Tracing = NO_TRACING) -> None:
        self._clock = clock
        self._tracing = tracing

    def begin(self, metadata: Mapping[str, str]) -> CallTrace:
        """Returns the place of a new call: below its caller's span, where its metadata states one."""
        traceparent, parent = begin_trace(self._tracing, metadata.get(TRACEPARENT))
        return CallTrace(traceparent, parent, self._clock.monotonic())

    def end(self, call: CallTrace, path: str, receipt: receipt_pb2.Receipt | None) -> None:
        """Records the span of a call; `path` names its method, as `/weft.api.router.v1.InferenceService/Generate`."""
        sampling = self._tracing.sampling
        if sampling is None or receipt is None:
            return
        context = TraceContext.parse(call.traceparent)
        seconds = self._clock.monotonic() - call.began
        if not sampling.records(context, has_failed=receipt.outcome in _FAILURES, seconds=seconds):
            return
        service, method = path.removeprefix("/").rsplit("/", 1)
        reason, now = Reason(receipt.reason), self._clock.utc_now().timestamp()
        span = Span(
            name=f"{service}/{method}",
            service=ServiceName.ROUTER,
            context=context,
            parent_id=None if call.parent is None else call.parent.span_id,
            start=int((now - seconds) * 1e9),
            end=int(now * 1e9),
            kind=SpanKind.SERVER,
            attributes={
                Attribute.RPC_SYSTEM: "grpc",
                Attribute.RPC_SERVICE: service,
                Attribute.RPC_METHOD: method,
                Attribute.REQUEST_ID: receipt.request_id,
            },
            error="" if reason is Reason.UNSPECIFIED else reason.name.lower(),
        )
        self._tracing.record([span])
