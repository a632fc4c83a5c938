"""The spans of a router: calls of the public gRPC API, and wakes and loads caused by waiting requests."""

from collections.abc import Mapping
from dataclasses import dataclass

from router_svc.policy.decisions import Wakes
from weft.api.common.v1 import receipt_pb2
from weft.dispatch.fleet import FleetView
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.structured_logs import TRACEPARENT, new_span_id, new_trace_id
from weft.kernel.telemetry.tracing import (
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
)
from weft.kernel.time.clock import Clock

_FAILURES = frozenset({receipt_pb2.OUTCOME_FAILED, receipt_pb2.OUTCOME_REJECTED})


@dataclass(frozen=True, slots=True)
class CallTrace:
    """The position of a call in a trace."""

    traceparent: str
    """Trace context for everything that the call causes."""
    parent: TraceContext | None
    """The caller's span; None: not stated."""
    began: float
    """Seconds on the monotonic clock."""


class CallSpans:
    """Begins the trace of each call, and records its span if the trace is sampled."""

    def __init__(self, clock: Clock, tracing: Tracing = NO_TRACING) -> None:
        self._clock = clock
        self._tracing = tracing

    def begin(self, metadata: Mapping[str, str]) -> CallTrace:
        """Returns the position of a new call: below its caller's span, if stated in the metadata."""
        traceparent, parent = begin_trace(self._tracing, metadata.get(TRACEPARENT))
        return CallTrace(traceparent, parent, self._clock.monotonic())

    def end(self, call: CallTrace, path: str, receipt: receipt_pb2.Receipt | None) -> None:
        """Records the span of a call; `path`: its method, such as `/weft.api.router.v1.InferenceService/Generate`."""
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
    """Begins the traces of wakes and records their spans. A model has at most one wake at a time.

    A wake serves many requests, so it has a separate trace, linked to the request that caused it and sampled like that.
    """

    def __init__(self, tracing: Tracing, clock: Clock) -> None:
        self._tracing = tracing
        self._clock = clock
        self._under_way: dict[str, _Wake] = {}

    def begin(self, wakes: Wakes, traceparent: str) -> None:
        """Records the start of a wake; `traceparent`: of the request that caused it; empty: unknown."""
        sampling = self._tracing.sampling
        if sampling is None:
            return
        request, trace_id = TraceContext.parse(traceparent) if traceparent else None, new_trace_id()
        is_sampled = sampling.chooses(trace_id) if request is None else sampling.below(request, 0).is_sampled
        context = TraceContext(trace_id, new_span_id(), is_sampled)
        self._under_way[wakes.model] = _Wake(wakes, self._clock.monotonic(), context, request)

    def ended(self, model: str, error: WeftError | None, view: FleetView) -> None:
        """Records the span of a finished wake, if its trace is sampled."""
        wake = self._under_way.pop(model, None)
        if wake is None:
            return
        seconds = self._clock.monotonic() - wake.began
        if self._tracing.records(wake.context, has_failed=error is not None, seconds=seconds):
            self._tracing.record([_wake_span(wake, error, view, seconds, self._clock.utc_now().timestamp())])


def _wake_span(wake: _Wake, error: WeftError | None, view: FleetView, seconds: float, now: float) -> Span:
    model = view.models.get(wake.wakes.model)
    # Its host may have returned with another runner.
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
