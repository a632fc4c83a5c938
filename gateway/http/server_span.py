"""The span of one HTTP request, made when its answer has ended."""

from starlette.types import Scope

from gateway.errors import ClientGoneError
from gateway.openapi import shown_path
from gateway.request_facts import RequestFacts, headers_of
from weft.kernel.clock import Clock
from weft.kernel.tracing import Attribute, AttributeValue, ServiceName, Span, SpanKind, Tracing, error_type

TRACEPARENT = b"traceparent"
_FIRST_SERVER_ERROR = 500
_PROBES = frozenset({"health", "metrics"})


class ServerSpans:
    """Begins the trace of each HTTP request, and records its span if the trace is recorded."""

    def __init__(self, tracing: Tracing, clock: Clock, service: ServiceName = ServiceName.GATEWAY) -> None:
        """`service` is the one that answers."""
        self._service = service
        self._tracing = tracing
        self._clock = clock

    def begin(self, scope: Scope, facts: RequestFacts) -> None:
        """Gives a request its place in a trace: below its caller's span, where the caller states one."""
        sampling = self._tracing.sampling
        if sampling is not None:
            header = headers_of(scope).get(TRACEPARENT)
            facts.trace, facts.caller_span = sampling.begin(None if header is None else header.decode("latin-1"))

    def end(self, scope: Scope, facts: RequestFacts, ended: float) -> None:
        """Records the span of a request that ended at `ended`, in seconds on the clock of `facts.arrived`."""
        context, seconds = facts.trace, ended - facts.arrived
        if context is None or not self._tracing.records(context, has_failed=_has_failed(facts), seconds=seconds):
            return
        found: dict[str, AttributeValue] = {
            Attribute.HTTP_METHOD: scope["method"],
            Attribute.PATH: scope["path"],
            Attribute.SCHEME: scope.get("scheme", "http"),
            Attribute.HTTP_STATUS: facts.status,
            Attribute.REQUEST_ID: facts.request_id,
            Attribute.CALLER: facts.principal.name,
        }
        route = shown_path(scope["route"].path) if "route" in scope else ""
        if route:
            found[Attribute.HTTP_ROUTE] = route
        if facts.task_id:
            found[Attribute.TASK_ID] = facts.task_id
        now = self._clock.utc_now().timestamp() - (self._clock.monotonic() - ended)
        span = Span(
            name=f"{scope['method']} {route}".rstrip(),
            service=self._service,
            context=context,
            parent_id=None if facts.caller_span is None else facts.caller_span.span_id,
            start=int((now - seconds) * 1e9),
            end=int(now * 1e9),
            kind=SpanKind.SERVER,
            attributes=found,
            error="" if facts.error is None else error_type(facts.error.reason),
        )
        self._tracing.record([span])


def _has_failed(facts: RequestFacts) -> bool:
    """Whether a request is recorded for its failure: not those that its caller left, refused strangers, or probes."""
    if facts.error is None or facts.surface in _PROBES or isinstance(facts.error, ClientGoneError):
        return False
    return facts.was_dispatched or facts.status >= _FIRST_SERVER_ERROR
