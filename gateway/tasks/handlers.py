"""`/api/v1/inference-tasks`: submit, list, get, watch, cancel and delete durable tasks."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

import msgspec
from google.protobuf.json_format import MessageToDict
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from gateway.answers.event_stream import EventStream
from gateway.answers.sse import encode_json
from gateway.answers.unary import json_response
from gateway.deps import GatewayDeps
from gateway.errors import public_message
from gateway.intake.body import read_json_body
from gateway.intake.headers import headers_of, tenant_of
from gateway.intake.json_guard import parse
from gateway.intake.query import Query
from gateway.request_facts import facts_of
from gateway.resources.handlers import API
from gateway.tasks.submission import NewTaskBody, model_of, new_task, submitted
from gateway.tasks.task_api import TaskApis
from gateway.tasks.task_apis import answer_of
from weft.api.router.v1 import task_pb2
from weft.durable.tasks import (
    DEFAULT_LISTED,
    MAX_LISTED,
    Task,
    TaskAttempt,
    TaskChunk,
    TaskEvent,
    TaskFailure,
    TaskPage,
    TaskPort,
    TaskQuery,
    TaskState,
)
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.names import MAX_REQUEST_ID_CHARS, require_token
from weft.kernel.reasons import Reason

JsonObject = dict[str, object]


def task_json(task: Task, task_apis: TaskApis) -> JsonObject:
    """A task; see `gateway.tasks.submission.TaskObject`."""
    surface = task_apis.of_kind(task.origin_kind)
    return {
        "id": task.id,
        "object": "inference_task",
        "state": task.state.name.lower(),
        "model": task.model,
        "endpoint": None if surface is None else surface.endpoint,
        "batch": task.batch or None,
        "created_at": time_text(task.created_at),
        "started_at": _time(task.started_at),
        "ended_at": _time(task.ended_at),
        "expires_at": _time(task.expires_at),
        "attempt": task.attempt,
        "max_attempts": task.max_attempts,
        "last_event": task.last_event,
        "waiting_for": task.waiting_for or None,
        "error": _failure(task.error),
    }


def attempt_json(attempt: TaskAttempt) -> JsonObject:
    """Returns one attempt of a task; its router is of no interest to callers."""
    failure = None
    if attempt.reason is not Reason.UNSPECIFIED:
        failure = TaskFailure(reason=attempt.reason, message=attempt.message)
    return {
        "attempt": attempt.attempt,
        "claimed_at": time_text(attempt.claimed_at),
        "ended_at": _time(attempt.ended_at),
        "error": _failure(failure),
    }


def error_json(error: WeftError) -> JsonObject:
    """Returns a failure as in the error envelope."""
    return {"code": error.reason.name.lower(), "message": public_message(error)}


def page_json(page: TaskPage, task_apis: TaskApis) -> JsonObject:
    """A page of a list."""
    return {
        "object": "list",
        "data": [task_json(task, task_apis) for task in page.tasks],
        "next_page_token": page.next_page_token or None,
        **({"notice": page.notice} if page.notice else {}),
    }


def chunk_json(piece: TaskChunk) -> JsonObject:
    """Returns a chunk of an answer: events and vectors as proto JSON, with proto field names."""
    return {
        "attempt": piece.attempt,
        "last_event": piece.last_event,
        **MessageToDict(piece.output, preserving_proto_field_name=True),
    }


async def encoded_task_events(
    news: AsyncGenerator[TaskEvent], task_apis: TaskApis, after: int
) -> AsyncGenerator[bytes]:
    """Yields server-sent events `task` and `output`; resuming at the id of the last one misses nothing."""
    number = after
    async with aclosing(news):
        async for item in news:
            if isinstance(item, TaskChunk):
                number = item.last_event
                yield _event("output", number, chunk_json(item))
            else:
                yield _event("task", number, task_json(item, task_apis))


def _event(name: str, number: int, body: JsonObject) -> bytes:
    return b"event: %b\nid: %d\ndata: %b\n\n" % (name.encode(), number, encode_json(body))


def time_text(time: datetime) -> str:
    """RFC 3339 in UTC, to the millisecond."""
    return time.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _time(time: datetime | None) -> str | None:
    return None if time is None else time_text(time)


def _failure(failure: TaskFailure | None) -> JsonObject | None:
    return None if failure is None else error_json(WeftError(failure.reason, failure.message))


SURFACE = "tasks"
PATH = f"{API}/inference-tasks"
MAX_EVENT_NUMBER = 2**63 - 1
_ONE = f"{PATH}/{{id}}"
LIST_PARAMETERS = ("state", "model", "limit", "page_token")
_STATES = {state.name.lower(): state for state in TaskState}
_MAX_DIGITS = 19


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDeps:
    """Collaborators of the endpoints of durable tasks."""

    gateway: GatewayDeps
    tasks: TaskPort
    task_apis: TaskApis


async def submit_task(deps: TaskDeps, request: Request) -> Response:
    """Accept a request that nobody waits for. Once this answers it is durable.

    202 for a new task; with the `Idempotency-Key` of an earlier one 200 and that task as it is.
    """
    scope = request.scope
    facts_of(scope).surface = SURFACE
    Query(scope)
    raw = await read_json_body(scope, request.receive, deps.gateway.config)
    wanted = parse(NewTaskBody, raw, max_depth=deps.gateway.config.limits.max_json_depth)
    deps.gateway.note(scope, surface=SURFACE, model=model_of(wanted))
    new = await new_task(scope, wanted, deps.task_apis, count=partial(deps.gateway.count, scope, tenant_of(scope)))
    accepted = await submitted(deps.tasks, new)
    facts_of(scope).task_id = accepted.task.id
    response = json_response(task_json(accepted.task, deps.task_apis), 200 if accepted.existed else 202)
    response.headers["location"] = f"{PATH}/{accepted.task.id}"
    return response


async def list_tasks(deps: TaskDeps, request: Request) -> Response:
    """Tasks of the caller's tenant, the newest first, a page at a time."""
    scope = request.scope
    facts_of(scope).surface = SURFACE
    query = Query(scope, frozenset(LIST_PARAMETERS))
    limit = query.count("limit", MAX_LISTED)
    wanted = TaskQuery(
        states=_states(query),
        model=query.text("model"),
        page_size=limit or DEFAULT_LISTED,
        page_token=query.text("page_token"),
    )
    return json_response(page_json(await deps.tasks.list_page(tenant_of(scope), wanted), deps.task_apis))


async def get_task(deps: TaskDeps, request: Request) -> Response:
    """A task with its attempts; once it is completed with its result: what its endpoint would have answered."""
    tenant, task_id = _tenant_and_id(request)
    Query(request.scope)
    details = await deps.tasks.details(tenant, task_id)
    body = task_json(details.task, deps.task_apis)
    body["attempts"] = [attempt_json(attempt) for attempt in details.attempts]
    if details.task.state is TaskState.COMPLETED:
        outputs = await _outputs(deps.tasks, details.task, deps.gateway.config.task_timeout_seconds)
        try:
            body["result"] = msgspec.Raw(answer_of(details, deps.task_apis, outputs))
        except WeftError as error:
            body["error"] = error_json(error)
    return json_response(body)


async def watch_task(deps: TaskDeps, request: Request) -> Response:
    """A task and its answer as server-sent events `task` and `output`, until its end.

    `after`, or the header Last-Event-ID, is the `id` of the last event that the caller has.
    """
    tenant, task_id = _tenant_and_id(request)
    query = Query(request.scope, frozenset({"after"}))
    after = _after(request.scope, query)
    return EventStream(
        deps.gateway, encoded_task_events(deps.tasks.watch(tenant, task_id, after), deps.task_apis, after)
    )


async def cancel_task(deps: TaskDeps, request: Request) -> Response:
    """End a task, with its backend where it runs. One that is at its end stays as it is."""
    tenant, task_id = _tenant_and_id(request)
    Query(request.scope)
    return json_response(task_json(await deps.tasks.cancel(tenant, task_id), deps.task_apis))


async def delete_task(deps: TaskDeps, request: Request) -> Response:
    """End a task as `cancel` does; with forget=true forget one that is at its end, and answer 204."""
    tenant, task_id = _tenant_and_id(request)
    query = Query(request.scope, frozenset({"forget"}))
    if not query.flag("forget"):
        return json_response(task_json(await deps.tasks.cancel(tenant, task_id), deps.task_apis))
    await deps.tasks.delete(tenant, task_id)
    return Response(status_code=204)


async def _outputs(tasks: TaskPort, task: Task, timeout_seconds: float) -> list[task_pb2.TaskOutput]:
    """Returns the stored output of a completed task.

    Raises SERVICE_UNAVAILABLE where it is late or incomplete: the task was deleted meanwhile.
    """
    try:
        async with asyncio.timeout(timeout_seconds), aclosing(tasks.watch(task.tenant, task.id)) as news:
            pieces = [item async for item in news if isinstance(item, TaskChunk)]
    except TimeoutError:
        raise WeftError(Reason.SERVICE_UNAVAILABLE, "the task's answer could not be read in time") from None
    if task.last_event and (not pieces or pieces[-1].last_event != task.last_event):
        raise WeftError(Reason.SERVICE_UNAVAILABLE, "the task's answer could not be read to its end; ask again")
    return [piece.output for piece in pieces]


def _tenant_and_id(request: Request) -> tuple[str, str]:
    """Returns the tenant and the id of a task."""
    facts_of(request.scope).surface = SURFACE
    return tenant_of(request.scope), require_token(request.path_params["id"], "id", MAX_REQUEST_ID_CHARS)


def _states(query: Query) -> frozenset[TaskState]:
    if "state" not in query:
        return frozenset()
    names = query.text("state").split(",")
    if not set(names) <= _STATES.keys():
        raise invalid_field("state", f"must be one or more of {', '.join(_STATES)}, with commas in between")
    return frozenset(_STATES[name] for name in names)


def _after(scope: Scope, query: Query) -> int:
    """Returns the number of the caller's last event; 0: none. A browser that reconnects sends it in a header."""
    given = headers_of(scope).get(b"last-event-id")
    if given is not None:
        return _event_number(given.decode("latin-1"), "Last-Event-ID")
    return _event_number(query.text("after"), "after") if "after" in query else 0


def _event_number(text: str, field: str) -> int:
    is_number = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
    if not is_number or int(text) > MAX_EVENT_NUMBER:
        raise invalid_field(field, f"must be a whole number from 0 to {MAX_EVENT_NUMBER}")
    return int(text)
