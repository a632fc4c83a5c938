"""The spans of an operation, from its acceptance to its end.

POST /v1/admin/models/...        the caller's span, which has already ended
weft.operation                 the operation: action, model, runner, outcome
weft.queue                   until it began
weft.operation.stage         one for each stage reported by its runner, such as "waiting for memory"

Only the executing process knows the stages: an operation that continues after a restart of the registry has a new
trace with the stages since then.
"""

from dataclasses import dataclass, field
from datetime import datetime

from weft.api.operations.v1.operation_pb2 import Operation
from weft.documents.codec import word_of
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.structured_logs import new_span_id
from weft.kernel.telemetry.tracing import (
    NO_TRACING,
    Attribute,
    AttributeValue,
    ServiceName,
    Span,
    SpanName,
    TraceContext,
    Tracing,
    error_type,
    span_id_of,
    trace_id_from,
)
from weft.kernel.time.timestamps import stamp_of

MAX_STAGES = 32
"""Maximum recorded stages of an operation; later ones count as part of the last."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of an operation, and when it began."""

    name: str
    began: int
    """Nanoseconds since the epoch."""


@dataclass(slots=True)
class OperationTrace:
    """An operation's position in a trace, and its stages so far."""

    context: TraceContext
    caller: TraceContext | None
    """The caller's span; None: unknown."""
    stages: list[Stage] = field(default_factory=list)

    def note(self, stage: str, now: datetime) -> None:
        """Records the operation's current stage."""
        is_new = not self.stages or self.stages[-1].name != stage
        if stage and is_new and len(self.stages) < MAX_STAGES:
            self.stages.append(Stage(stage, stamp_of(now).ToNanoseconds()))


class OperationSpans:
    """Creates traces of operations, and records their spans."""

    def __init__(self, tracing: Tracing = NO_TRACING) -> None:
        self._tracing = tracing

    def begin(self, operation_id: str, traceparent: str = "") -> OperationTrace | None:
        """Returns the trace of an operation; None if tracing is off. `traceparent` is valid or empty."""
        sampling = self._tracing.sampling
        if sampling is None:
            return None
        if traceparent:
            caller = TraceContext.parse(traceparent)
            return OperationTrace(sampling.below(caller, span_id_of(operation_id)), caller)
        trace_id = trace_id_from(operation_id)
        return OperationTrace(TraceContext(trace_id, span_id_of(operation_id), sampling.chooses(trace_id)), None)

    def ended(self, operation: Operation, trace: OperationTrace | None) -> None:
        """Records the spans of an ended operation, if its trace is recorded."""
        if trace is None:
            return
        seconds = (operation.end_time.ToNanoseconds() - operation.create_time.ToNanoseconds()) / 1e9
        has_failed = operation.state == Operation.STATE_FAILED
        if self._tracing.records(trace.context, has_failed=has_failed, seconds=seconds):
            self._tracing.record(operation_spans(operation, trace))


def operation_spans(operation: Operation, trace: OperationTrace) -> list[Span]:
    """Returns the spans of an ended operation."""
    created, ended = operation.create_time.ToNanoseconds(), operation.end_time.ToNanoseconds()
    begun = operation.start_time.ToNanoseconds() if operation.HasField("start_time") else ended
    whole = Span(
        name=SpanName.OPERATION,
        service=ServiceName.REGISTRY,
        context=trace.context,
        parent_id=None if trace.caller is None else trace.caller.span_id,
        start=created,
        end=ended,
        attributes=_attributes(operation),
        error=error_type(Reason(operation.reason)),
    )
    queue = _part(trace, SpanName.QUEUE, created, begun, {})
    stages = []
    for number, stage in enumerate(trace.stages, 1):
        end = trace.stages[number].began if number < len(trace.stages) else ended
        stages.append(_part(trace, SpanName.STAGE, stage.began, end, {Attribute.STAGE: stage.name}))
    return [whole, queue, *stages]


def _part(trace: OperationTrace, name: SpanName, began: int, ended: int, attributes: dict[str, AttributeValue]) -> Span:
    above = trace.context
    return Span(
        name=name,
        service=ServiceName.REGISTRY,
        context=above.child(new_span_id()),
        parent_id=above.span_id,
        start=began,
        end=ended,
        attributes=attributes,
    )


def _attributes(operation: Operation) -> dict[str, AttributeValue]:
    kind = operation.action.WhichOneof("kind") or ""
    # The name in the mesh, also of a load by source.
    model = getattr(getattr(operation.action, kind, None), "model", "")
    named = {
        Attribute.OPERATION_ID: operation.name.rpartition("/")[2],
        Attribute.REQUEST_ID: operation.request_id,
        Attribute.ACTION: kind.partition("_")[0],
        Attribute.REQUEST_MODEL: model or (operation.result.added.name if kind == "load_model" else ""),
        Attribute.RUNNER: operation.runner,
        Attribute.CALLER: operation.requested_by,
        Attribute.OUTCOME: word_of(operation, "state"),
    }
    return {name: text for name, text in named.items() if text}
