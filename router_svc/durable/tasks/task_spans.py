"""The span of a durable task, from its submission to its end, over all its attempts and routers.

POST /v1/tasks                   the submission, which has long ended
weft.task                      linked to it; its id follows from the task's, so that each router knows it
chat <model>                 one per attempt, with the spans of every request
"""

from router_svc.durable.tasks.sql_store import SqlTaskStore
from router_svc.durable.tasks.task_records import PendingTask
from weft.api.router.v1 import task_pb2
from weft.durable.tasks import state_name
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import reason_of
from weft.kernel.telemetry.log import get_logger
from weft.kernel.telemetry.structured_logs import new_traceparent, valid_traceparent
from weft.kernel.telemetry.tracing import (
    NO_TRACING,
    Attribute,
    Sampling,
    ServiceName,
    Span,
    SpanName,
    TraceContext,
    Tracing,
    error_type,
    span_id_of,
    trace_id_from,
)

log = get_logger("weft.tasks")


def submission_span(spec: task_pb2.TaskSpec) -> TraceContext | None:
    """Returns the span in which a task was submitted; None: not stated."""
    stated = valid_traceparent(spec.traceparent)
    return None if stated is None else TraceContext.parse(stated)


def task_span(task_id: str, spec: task_pb2.TaskSpec, sampling: Sampling) -> TraceContext:
    """Returns the context of a task, in its submission's trace if there is one, else in a separate trace."""
    above = submission_span(spec)
    if above is not None:
        return above.child(span_id_of(task_id))
    trace_id = trace_id_from(task_id)
    return TraceContext(trace_id, span_id_of(task_id), sampling.chooses(trace_id))


def traceparent_of_task(task_id: str, spec: task_pb2.TaskSpec, tracing: Tracing) -> str:
    """Returns the trace context of a task's attempts."""
    if tracing.sampling is None:
        return valid_traceparent(spec.traceparent) or new_traceparent()
    return task_span(task_id, spec, tracing.sampling).traceparent


class TaskSpans:
    """Records the spans of tasks that end on this router."""

    def __init__(self, store: SqlTaskStore, tracing: Tracing = NO_TRACING) -> None:
        self._store = store
        self._tracing = tracing

    async def task_ended(self, task: PendingTask, *, has_failed: bool) -> None:
        """Records the span of an ended task if its trace is sampled. Never raises."""
        sampling = self._tracing.sampling
        if sampling is None:
            return
        context = task_span(task.id, task_pb2.TaskSpec.FromString(task.spec), sampling)
        # Tasks may wait for hours, so none counts as slow.
        if not self._tracing.records(context, has_failed=has_failed, seconds=0.0):
            return
        try:
            found = await self._store.details(task.lane.tenant, task.id)
        except WeftError as error:
            log.warning("a task has no span: it could not be read", task=task.id, why=error.message)
            return
        if found is not None:
            self._tracing.record([_span(found.task, context, submission_span(found.spec))])


def _span(task: task_pb2.Task, context: TraceContext, submission: TraceContext | None) -> Span:
    return Span(
        name=SpanName.TASK,
        service=ServiceName.ROUTER,
        context=context,
        parent_id=None if submission is None else submission.span_id,
        start=task.create_time.ToNanoseconds(),
        end=task.end_time.ToNanoseconds(),
        attributes={
            Attribute.TASK_ID: task.id,
            Attribute.REQUEST_MODEL: task.model,
            Attribute.TENANT: task.tenant,
            Attribute.CALLER: task.caller,
            Attribute.OUTCOME: state_name(task.state).lower(),
            Attribute.ATTEMPTS: task.attempt,
        },
        error=error_type(reason_of(task.error.reason)) if task.HasField("error") else "",
        links=() if submission is None else (submission,),
    )
