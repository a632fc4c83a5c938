"""`/api/v1/inference-tasks`: submit, list, get, watch, cancel and delete durable tasks."""

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from google.protobuf.json_format import MessageToDict
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from gateway.answers.api_object import JsonObject, Shows, object_json
from gateway.answers.sse_writer import EventStream, encoded_records
from gateway.answers.unary import json_response
from gateway.deps import Gateway
from gateway.errors import public_message
from gateway.intake.body import read_json_body
from gateway.intake.headers import idempotency_key_of, tenant_of
from gateway.intake.json_guard import parse, without_halves
from gateway.intake.query import Query, begin_change, begin_owned, begin_read, whole_number
from gateway.intake.request_model import JsonMap, StrictModel
from gateway.openai.extension_fields import unknown_fields
from gateway.request_facts import facts_of, headers_of
from gateway.resources.resource_handlers import API
from gateway.routing import collaborator
from gateway.tasks.result_content import link_of, with_content
from gateway.tasks.task_apis import SpecContext, TaskApis
from weft.api.common.v1 import event_pb2
from weft.api.router.v1 import task_pb2
from weft.api.router.v1 import task_service_pb2 as pb
from weft.documents.codec import document_of
from weft.durable.tasks import MAX_LISTED, TaskClient, failure_of, state_name
from weft.kernel.errors.error_tree import WeftError, invalid_field, renaming_fields
from weft.kernel.errors.reasons import Reason, reason_of
from weft.kernel.text.json_lines import encode_json
from weft.kernel.values.names import MAX_REQUEST_ID_CHARS, require_token

MAX_MODEL_CHARS = 256
MAX_ENDPOINT_CHARS = 64
MAX_PENDING_SECONDS = 7 * 86_400
MAX_ATTEMPTS = 100

StateName = Literal["pending", "running", "completed", "failed", "cancelled"]


class NewTaskBody(StrictModel):
    """A request to run as a durable task."""

    model: Annotated[str, Field(min_length=1, max_length=MAX_MODEL_CHARS)] | None = None
    """Model, if `body` has none."""
    endpoint: Annotated[str, Field(min_length=1, max_length=MAX_ENDPOINT_CHARS)] = "/v1/chat/completions"
    """Endpoint of the request, such as `/v1/chat/completions`."""
    body: JsonMap
    """Body of the request to that endpoint; `stream` is ignored."""
    pending_limit_seconds: Annotated[float, Field(ge=1, le=MAX_PENDING_SECONDS)] | None = None
    """Maximum wait before each attempt, after which the task fails. Absent: `router.tasks.pending_limit_seconds`."""
    max_attempts: Annotated[int, Field(ge=1, le=MAX_ATTEMPTS)] | None = None
    """Maximum number of attempts. Absent: `router.tasks.max_attempts`."""
    wait_for_model: bool = False
    """Whether a task for an unknown model is accepted and waits for the model; otherwise the answer is 404."""


class TaskErrorObject(BaseModel):
    """The failure of a task or of an attempt."""

    code: str
    message: str


class TaskAttemptObject(BaseModel):
    """One attempt of a task."""

    attempt: int
    claimed_at: Annotated[str, Shows("claim_time")]
    ended_at: Annotated[str | None, Shows("end_time")]
    error: TaskErrorObject | None


class TaskRetryObject(BaseModel):
    """A pause between two attempts."""

    error: TaskErrorObject
    """Why the last attempt failed."""
    next_at: Annotated[str | None, Shows("next_time")]
    """The earliest time of the next attempt; null: as soon as a slot is free."""
    failed: Annotated[int, Shows("failed_count")]
    """Failed attempts that count toward `max_attempts`."""


class TaskProgress(BaseModel):
    """Progress of a running task on an image or a recording."""

    unit: Literal["steps", "audio_seconds", "characters"] | None
    """Unit of `done` and `total`; null: unknown."""
    done: float
    total: float | None
    """Total amount of work; null: unknown."""
    stage: str | None
    """Description of the current stage; null: the work itself."""


class TaskObject(BaseModel):
    """A task. Times are RFC 3339 in UTC."""

    id: str
    object: Literal["inference_task"]
    state: StateName
    model: str
    endpoint: str | None
    """Endpoint of the request; null: the task was not submitted over HTTP."""
    batch: str | None
    created_at: Annotated[str, Shows("create_time")]
    started_at: Annotated[str | None, Shows("start_time")]
    ended_at: Annotated[str | None, Shows("end_time")]
    expires_at: Annotated[str | None, Shows("expire_time")]
    attempt: int
    max_attempts: int
    last_event: int
    waiting_for: str | None
    caller: str | None = None
    """Submitter, such as `key:<id>`."""
    user: str | None = None
    """End user, as named in the request; absent: none."""
    metadata: dict[str, str] | None = None
    """The `metadata` of the request; absent: none."""
    request_id: str | None = None
    """The X-Request-Id of a journaled request; absent: it is not a journaled request."""
    progress: TaskProgress | None = None
    """Progress on an image or a recording; absent: unknown, or the task is not running."""
    retry: TaskRetryObject | None = None
    """Why the last attempt failed and when the next one starts; absent: it is not waiting for a retry."""
    error: TaskErrorObject | None
    attempts: list[TaskAttemptObject] | None = None
    """Only if a single task is requested."""
    result: dict[str, Any] | None = None
    """The answer of its endpoint; only if a single completed task is requested."""
    body: dict[str, Any] | None = None
    """The submitted request; only with body=true, for its submitter."""


class TaskList(BaseModel):
    """A page of tasks, newest first."""

    object: Literal["list"]
    data: list[TaskObject]
    next_page_token: str | None
    """Token of the next page; null on the last page."""
    notice: str | None = None
    """Warning for operators about the task store; absent: none."""


_NANOSECONDS = 1e9
_BODY = "body"
_SPEC = "spec"
_NAMES = (
    ("idempotency_key", "Idempotency-Key"),
    ("page_size", "limit"),
    ("after_event", "after"),
    ("spec.pending_limit", "pending_limit_seconds"),
    ("spec.max_attempts", "max_attempts"),
    ("spec.payload.audio", "body.file"),
    ("spec.payload.", "body."),
    ("spec.", "body."),
)
"""Field names of the task port, and their names in this API."""


async def submission_of(
    scope: Scope, wanted: NewTaskBody, task_apis: TaskApis, *, count: Callable[[], None]
) -> pb.SubmitTaskRequest:
    """Returns the task to submit.

    `count` is called once the body is valid, before media are fetched for it. Raises as `ServedTaskApi.supplied_spec`,
    `count` and INVALID_ARGUMENT naming the field.
    """
    served = await task_apis.of_endpoint(wanted.endpoint)
    key = idempotency_key_of(headers_of(scope))
    raw = json.dumps(_body_of(wanted), ensure_ascii=False, separators=(",", ":")).encode()
    submission = SpecContext(scope=scope, field=_BODY, is_repeatable=bool(key), before_fetching=count)
    spec = await served.supplied_spec(raw, submission)
    if wanted.pending_limit_seconds is not None:
        spec.pending_limit.FromNanoseconds(math.ceil(wanted.pending_limit_seconds * _NANOSECONDS))
    spec.max_attempts = wanted.max_attempts or 0
    spec.wait_for_model = wanted.wait_for_model
    return pb.SubmitTaskRequest(spec=spec, idempotency_key=key)


async def submitted(tasks: TaskClient, scope: Scope, request: pb.SubmitTaskRequest) -> pb.SubmitTaskResponse:
    """Submits the task. Raises as `TaskClient.submit`, with field names of the HTTP body."""
    with renaming_fields(_own_name):
        return await tasks.submit(tenant_of(scope), request, caller=facts_of(scope).principal.name)


def _own_name(field: str) -> str:
    if field in {_SPEC, f"{_SPEC}.origin"}:
        return _BODY
    for theirs, ours in _NAMES:
        if field.startswith(theirs):
            return ours + field.removeprefix(theirs)
    return field


def model_of(wanted: NewTaskBody) -> str:
    """Returns the requested model name, for metrics; empty: none."""
    named = wanted.body.get("model", wanted.model)
    return named if isinstance(named, str) else ""


def _body_of(wanted: NewTaskBody) -> dict[str, object]:
    if wanted.model is None:
        return wanted.body
    if wanted.body.get("model", wanted.model) != wanted.model:
        raise invalid_field("model", "differs from the one in the body: set it once")
    return {**wanted.body, "model": wanted.model}


def task_json(task: task_pb2.Task, task_apis: TaskApis) -> JsonObject:
    """Returns a task; see `TaskObject`."""
    return object_json(
        TaskObject,
        task,
        state=state_name(task.state).lower(),
        endpoint=task_apis.endpoint_of(task.origin_kind),
        error=_failure(failure_of(task)),
        **_submitter(task),
    )


def _submitter(task: task_pb2.Task) -> dict[str, object]:
    """Returns the known members about a task's submitter, progress and retry."""
    known: dict[str, object] = {
        "caller": task.caller,
        "user": task.user,
        "metadata": dict(task.metadata),
        "request_id": task.request_id,
    }
    if task.HasField("progress"):
        known["progress"] = _progress(task.progress)
    if task.HasField("retry"):
        failure = WeftError(reason_of(task.retry.error.reason), task.retry.error.message)
        known["retry"] = object_json(TaskRetryObject, task.retry, error=error_json(failure))
    return {name: value for name, value in known.items() if value}


def _progress(progress: event_pb2.WorkProgress) -> JsonObject:
    known = progress.unit in event_pb2.WorkUnit.values() and progress.unit
    unit = event_pb2.WorkUnit.Name(progress.unit).removeprefix("WORK_UNIT_").lower() if known else None
    return {"unit": unit, "done": progress.done, "total": progress.total or None, "stage": progress.stage or None}


def attempt_json(attempt: task_pb2.TaskAttempt) -> JsonObject:
    """Returns one attempt of a task, without its router."""
    failure = WeftError(reason_of(attempt.reason), attempt.message) if attempt.reason else None
    return object_json(TaskAttemptObject, attempt, error=_failure(failure))


def error_json(error: WeftError) -> JsonObject:
    """Returns a failure as in the error envelope."""
    return {"code": error.reason.name.lower(), "message": public_message(error)}


def page_json(page: pb.ListTasksResponse, task_apis: TaskApis) -> JsonObject:
    """Returns a page of a list."""
    tasks = [task_json(task, task_apis) for task in page.tasks]
    notice = {"notice": page.notice} if page.notice else {}
    return object_json(TaskList, page, data=tasks, **notice)


def chunk_json(piece: task_pb2.TaskPiece) -> JsonObject:
    """Returns a chunk of an answer: events and vectors as proto JSON, with proto field names."""
    return {
        "attempt": piece.attempt,
        "last_event": piece.last_event,
        **MessageToDict(piece.output, preserving_proto_field_name=True),
    }


async def encoded_task_events(
    news: AsyncGenerator[pb.WatchTaskResponse], task_apis: TaskApis, after: int
) -> AsyncGenerator[bytes]:
    """Yields server-sent events `task` and `output`. Resuming after the id of the last one misses nothing."""
    number = after
    with renaming_fields(_own_name):
        async with aclosing(news):
            async for item in news:
                if item.HasField("piece"):
                    number = item.piece.last_event
                    yield _event("output", number, chunk_json(item.piece))
                else:
                    yield _event("task", number, task_json(item.task, task_apis))


def _event(name: str, number: int, body: JsonObject) -> bytes:
    return b"event: %b\nid: %d\ndata: %b\n\n" % (name.encode(), number, encode_json(body))


def _failure(failure: WeftError | None) -> JsonObject | None:
    return None if failure is None else error_json(failure)


SURFACE = "tasks"
PATH = f"{API}/inference-tasks"
MAX_EVENT_NUMBER = 2**63 - 1
ANSWER_SECONDS = 30.0
"""Maximum time to read the whole answer of a task."""
LIST_PARAMETERS = ("state", "model", "caller", "request_id", "limit", "page_token")
_STATES = {state_name(state).lower(): state for state in task_pb2.TaskState.values() if state}


Tasks = Annotated[TaskClient, collaborator(TaskClient)]
Apis = Annotated[TaskApis, collaborator(TaskApis)]


async def submit_task(deps: Gateway, tasks: Tasks, task_apis: Apis, request: Request) -> Response:
    """Submits a request as a task that runs without a waiting caller. It is durable before the answer is sent.

    Answers 202 for a new task, or 200 with the existing task if its `Idempotency-Key` is repeated.
    """
    scope = request.scope
    begin_read(request, SURFACE)
    raw = without_halves(await read_json_body(scope, request.receive, deps.config))
    wanted = parse(NewTaskBody, raw, max_depth=deps.config.limits.max_json_depth)
    deps.note(scope, surface=SURFACE, model=model_of(wanted))
    submission = await submission_of(scope, wanted, task_apis, count=partial(deps.count, scope, tenant_of(scope)))
    accepted = await submitted(tasks, scope, submission)
    facts_of(scope).task_id = accepted.task.id
    status = 200 if accepted.existed else 202
    response = json_response(task_json(accepted.task, task_apis), status, warnings=unknown_fields(wanted))
    response.headers["location"] = f"{PATH}/{accepted.task.id}"
    return response


async def list_tasks(tasks: Tasks, task_apis: Apis, request: Request) -> Response:
    """Lists tasks of the caller's tenant, newest first, in pages."""
    scope = request.scope
    query = begin_read(request, SURFACE, LIST_PARAMETERS)
    limit = query.count("limit", MAX_LISTED)
    wanted = pb.ListTasksRequest(
        states=_states(query),
        model=query.text("model"),
        caller=query.text("caller"),
        request_id=query.text("request_id"),
        page_size=limit,
        page_token=query.text("page_token"),
    )
    with renaming_fields(_own_name):
        return json_response(page_json(await tasks.list_page(tenant_of(scope), wanted), task_apis))


async def get_task(deps: Gateway, tasks: Tasks, task_apis: Apis, request: Request) -> Response:
    """Returns a task with its attempts. A completed task has its `result`: the answer of its endpoint.

    body=true adds the submitted request if the caller submitted it.
    """
    tenant, task_id = begin_owned(request, SURFACE, "id")
    query = Query(request.scope, frozenset({"body"}))
    details = await tasks.details(tenant, task_id)
    body = task_json(details.task, task_apis)
    is_own = details.task.caller == facts_of(request.scope).principal.name
    if query.flag("body") and is_own and task_apis.endpoint_of(details.task.origin_kind) is not None:
        body["body"] = msgspec.Raw(details.spec.origin)
    body["attempts"] = [attempt_json(attempt) for attempt in details.attempts]
    if details.task.state == task_pb2.TASK_STATE_COMPLETED:
        outputs = await outputs_of(tasks, details.task)
        names = await task_apis.has_links(details)
        base = "" if deps.links is None else deps.links.base_of(request.scope)
        try:
            outputs = await with_content(deps, tenant, outputs, has_links=names)
            answer = await task_apis.answer(details, outputs, link_of(deps, base, tenant))
            body["result"] = msgspec.Raw(answer)
        except WeftError as error:
            if error.reason is Reason.SERVICE_UNAVAILABLE:
                raise
            body["error"] = error_json(error)
    return json_response(body)


async def watch_task(deps: Gateway, tasks: Tasks, task_apis: Apis, request: Request) -> Response:
    """Streams a task and its answer as server-sent events `task` and `output` until the task ends.

    `after`, or the header Last-Event-ID, is the `id` of the last event that the caller has.
    """
    tenant, task_id = begin_owned(request, SURFACE, "id")
    query = Query(request.scope, frozenset({"after"}))
    after = _after(request.scope, query)
    return EventStream(deps, encoded_task_events(tasks.watch(tenant, task_id, after), task_apis, after))


async def cancel_task(tasks: Tasks, task_apis: Apis, request: Request) -> Response:
    """Cancels a waiting or running task. An ended task is unchanged."""
    tenant, task_id = begin_owned(request, SURFACE, "id")
    Query(request.scope)
    return json_response(task_json(await tasks.cancel(tenant, task_id), task_apis))


async def delete_task(tasks: Tasks, task_apis: Apis, request: Request) -> Response:
    """Cancels a task; with `forget=true`, deletes an ended task instead, and answers 204."""
    tenant, task_id = begin_owned(request, SURFACE, "id")
    query = Query(request.scope, frozenset({"forget"}))
    if not query.flag("forget"):
        return json_response(task_json(await tasks.cancel(tenant, task_id), task_apis))
    await tasks.delete(tenant, task_id)
    return Response(status_code=204)


# For operators: tasks of all tenants, as documents.
OPERATOR_LIST_PARAMETERS = ("state", "model", "caller", "limit")


def _tenant_shown(request: Request) -> str:
    """Returns the tenant whose tasks are shown; empty: all, if the caller may name tenants."""
    return "" if facts_of(request.scope).principal.names_tenants else tenant_of(request.scope)


async def list_task_records(tasks: Tasks, request: Request) -> Response:
    """Lists tasks, newest first."""
    query = begin_read(request, SURFACE, OPERATOR_LIST_PARAMETERS)
    wanted = pb.ListTasksRequest(
        states=_states(query),
        model=query.text("model"),
        caller=query.text("caller"),
        page_size=query.count("limit", MAX_LISTED),
    )
    return json_response(document_of(await tasks.list_page(_tenant_shown(request), wanted)))


async def get_task_record(tasks: Tasks, request: Request) -> Response:
    """Returns a task with its attempts and their receipts."""
    begin_read(request, SURFACE)
    return json_response(document_of(await tasks.details(_tenant_shown(request), _id_of(request))))


async def watch_task_record(deps: Gateway, tasks: Tasks, request: Request) -> Response:
    """Streams the changes of a task, and the chunks of its answer after the event `after`, until the task ends."""
    query = begin_read(request, SURFACE, ("after",))
    news = tasks.watch(_tenant_shown(request), _id_of(request), query.count("after", MAX_EVENT_NUMBER, least=0))
    return EventStream(deps, encoded_records(news))


async def cancel_task_record(tasks: Tasks, request: Request) -> Response:
    """Cancels a waiting or running task. An ended task is unchanged."""
    begin_change(request, SURFACE)
    return json_response(document_of(await tasks.cancel(_tenant_shown(request), _id_of(request))))


async def delete_task_record(tasks: Tasks, request: Request) -> Response:
    """Deletes an ended task."""
    begin_change(request, SURFACE)
    await tasks.delete(_tenant_shown(request), _id_of(request))
    return Response(status_code=204)


def _id_of(request: Request) -> str:
    return require_token(request.path_params["id"], "id", MAX_REQUEST_ID_CHARS)


async def outputs_of(tasks: TaskClient, task: task_pb2.Task) -> Sequence[task_pb2.TaskOutput]:
    """Returns the stored output of a completed task.

    Raises SERVICE_UNAVAILABLE if it is late, or incomplete because the task was deleted meanwhile.
    """
    try:
        async with asyncio.timeout(ANSWER_SECONDS), aclosing(tasks.watch(task.tenant, task.id)) as news:
            pieces = [item.piece async for item in news if item.HasField("piece")]
    except TimeoutError:
        raise WeftError(Reason.SERVICE_UNAVAILABLE, "the task's answer could not be read in time") from None
    if task.last_event and (not pieces or pieces[-1].last_event != task.last_event):
        raise WeftError(Reason.SERVICE_UNAVAILABLE, "the task's answer could not be read completely; try again")
    return [piece.output for piece in pieces]


def _states(query: Query) -> "list[task_pb2.TaskState.ValueType]":
    if "state" not in query:
        return []
    names = query.text("state").split(",")
    if not set(names) <= _STATES.keys():
        raise invalid_field("state", f"must be one or more of {', '.join(_STATES)}, with commas in between")
    return [_STATES[name] for name in names]


def _after(scope: Scope, query: Query) -> int:
    """Returns the number of the caller's last event; 0: none. A browser that reconnects sends it in a header."""
    given = headers_of(scope).get(b"last-event-id")
    if given is not None:
        return whole_number(given.decode("latin-1"), "Last-Event-ID", MAX_EVENT_NUMBER)
    return query.count("after", MAX_EVENT_NUMBER, least=0)
