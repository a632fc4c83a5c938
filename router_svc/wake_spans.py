"""The spans of wakes and loads that waiting requests caused, each in a trace of its own.

One wake serves many requests, so it is below none of them: it is linked to the request for which it was begun, and its
trace is recorded where that request's is.
"""

from dataclasses import dataclass

from router_svc.policy.decisions import Wakes
from weft.dispatch.fleet import FleetView
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.tracing import (
    Attribute,
    Sampling,
    ServiceName,
    Span,
    SpanName,
    TraceContext,
    Tracing,
    new_span_id,
    new_trace_id,
)


@dataclass(frozen=True, slots=True)
class _Wake:
    wakes: Wakes
    began: float
    context: TraceContext
    request: TraceContext | None


class WakeSpans:
    """Begins the traces of wakes, and records their spans. A model is woken once at a time."""

    def __init__(self, tracing: Tracing, clock: Clock) -> None:
        self._tracing = tracing
        self._clock = clock
        self._under_way: dict[str, _Wake] = {}

    def begin(self, wakes: Wakes, traceparent: str) -> None:
        """Notes a wake that begins; `traceparent` is that of the request for which it does; empty: unknown."""
        sampling = self._tracing.sampling
        if sampling is None:
            return
        request = TraceContext.parse(traceparent) if traceparent else None
        context = _context(request, sampling)
        self._under_way[wakes.model] = _Wake(wakes, self._clock.monotonic(), context, request)

    def ended(self, model: str, error: WeftError | None, view: FleetView) -> None:
        """Records the span of a wake that has ended, if its trace is recorded."""
        sampling, wake = self._tracing.sampling, self._under_way.pop(model, None)
        if sampling is None or wake is None:
            return
        seconds = self._clock.monotonic() - wake.began
        if sampling.records(wake.context, has_failed=error is not None, seconds=seconds):
            self._tracing.record([_span(wake, error, view, seconds, self._clock.utc_now().timestamp())])


def _context(request: TraceContext | None, sampling: Sampling) -> TraceContext:
    trace_id = new_trace_id()
    is_sampled = sampling.chooses(trace_id) if request is None else sampling.below(request, 0).is_sampled
    return TraceContext(trace_id, new_span_id(), is_sampled)


def _span(wake: _Wake, error: WeftError | None, view: FleetView, seconds: float, now: float) -> Span:
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
        error="" if error is None else error.reason.name.lower(),
        links=() if wake.request is None else (wake.request,),
    )
