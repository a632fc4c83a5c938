"""The spans of a router: of calls of the public gRPC API, and of the wakes and loads that waiting requests caused."""

from collections.abc import Mapping
from dataclasses import dataclass

from router_svc.policy.decisions import Wakes
from weft.api.common.v1 import receipt_pb2
from weft.dispatch.fleet import FleetView
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.telemetry import TRACEPARENT
from weft.kernel.tracing import (
    NO_TRACING,
    Attribute,
    ServiceName,
    Span,
    SpanKind,
    SpanName,
    TraceContext,
    Tracing,
    begin_trace,
    error_type,
    new_span_id,
    new_trace_id,
)

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
        if receipt is None or self._tracing.sampling is None:
            return
        context = TraceContext.parse(call.traceparent)
        seconds = self._clock.monotonic() - call.began
        if not self._tracing.records(context, has_failed=receipt.outcome in _FAILURES, seconds=seconds):
            return
        service, method = path.removeprefix("/").rsplit("/", 1)
        now = self._clock.utc_now().timestamp()
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
            error=error_type(Reason(receipt.reason)),
        )
        self._tracing.record([span])


@dataclass(frozen=True, slots=True)
class _Wake:
    wakes: Wakes
    began: float
    context: TraceContext
    request: TraceContext | None


class WakeSpans:
    """Begins the traces of wakes, and records their spans. A model is woken once at a time.

    One wake serves many requests, so it is below none of them: it has a trace of its own, linked to the request for
    which it was begun, and that trace is recorded where the request's is.
    """

    def __init__(self, tracing: Tracing, clock: Clock) -> None:
        self._tracing = tracing
        self._clock = clock
        self._under_way: dict[str, _Wake] = {}

    def begin(self, wakes: Wakes, traceparent: str) -> None:
        """Notes a wake that begins; `traceparent` is that of the request for which it does; empty: unknown."""
        sampling = self._tracing.sampling
        if sampling is None:
            return
        request, trace_id = TraceContext.parse(traceparent) if traceparent else None, new_trace_id()
        is_sampled = sampling.chooses(trace_id) if request is None else sampling.below(request, 0).is_sampled
        context = TraceContext(trace_id, new_span_id(), is_sampled)
        self._under_way[wakes.model] = _Wake(wakes, self._clock.monotonic(), context, request)

    def ended(self, model: str, error: WeftError | None, view: FleetView) -> None:
        """Records the span of a wake that has ended, if its trace is recorded."""
        wake = self._under_way.pop(model, None)
        if wake is None:
            return
        seconds = self._clock.monotonic() - wake.began
        if self._tracing.records(wake.context, has_failed=error is not None, seconds=seconds):
            self._tracing.record([_wake_span(wake, error, view, seconds, self._clock.utc_now().timestamp())])


def _wake_span(wake: _Wake, error: WeftError | None, view: FleetView, seconds: float, now: float) -> Span:
    model = view.models.get(wake.wakes.model)
    # Its host may have come back with another runner meanwhile.
    name = wake.wakes.runner if model is None else model.runner
    runner = view.runners.get(name)
    named = {
        Attribute.REQUEST_MODEL: wake.wakes.model,
        Attribute.RUNNER: name,
        Attribute.HOST: "" if runner is None else runner.host,
        Attribute.PRIORITY: wake.wakes.priority.name.lower(),
        Attribute.WAKE_REASON: wake.wakes.why,
        Attribute.OUTCOME: "succeeded" if error is None else "failed",
    }
    return Span(
        name=SpanName.WAKE,
        service=ServiceName.ROUTER,
        context=wake.context,
        parent_id=None,
        start=int((now - seconds) * 1e9),
        end=int(now * 1e9),
        attributes={attribute: text for attribute, text in named.items() if text},
        error="" if error is None else error_type(error.reason),
        links=() if wake.request is None else (wake.request,),
    )
