"""`/api/v1/inference-tasks`: requests that outlive their callers."""

import asyncio
from contextlib import aclosing
from functools import partial

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.types import Scope

from gateway.answers.event_stream import EventStream
from gateway.answers.unary import json_response
from gateway.intake.body import read_json_body
from gateway.intake.headers import headers_of, tenant_of
from gateway.intake.json_guard import parse
from gateway.intake.query import Query
from gateway.openapi import EVENTS, answers, json_body
from gateway.parts import GatewayParts
from gateway.request_facts import facts_of
from gateway.resources.endpoints import API
from gateway.tasks.documents import attempt_json, encoded_news, error_json, page_json, task_json
from gateway.tasks.submission import NewTaskBody, TaskList, TaskObject, model_of, new_task, submitted
from gateway.tasks.surface import Surfaces
from gateway.tasks.surfaces import answer_of
from weft.api.router.v1 import task_pb2
from weft.durable.tasks import DEFAULT_LISTED, MAX_LISTED, Task, TaskChunk, TaskPort, TaskQuery, TaskState
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.names import MAX_REQUEST_ID_CHARS, require_token
from weft.kernel.reasons import Reason

SURFACE = "tasks"
PATH = f"{API}/inference-tasks"
MAX_EVENT_NUMBER = 2**63 - 1
_ONE = f"{PATH}/{{id}}"
_LIST = ("state", "model", "limit", "page_token")
_STATES = {state.name.lower(): state for state in TaskState}
_MAX_DIGITS = 19


def add_tasks(app: FastAPI, parts: GatewayParts, tasks: TaskPort, surfaces: Surfaces) -> None:
    """Add the routes. A tenant sees its own tasks."""
    _add_submitting(app, parts, tasks, surfaces)
    _add_reading(app, parts, tasks, surfaces)
    _add_watching(app, parts, tasks, surfaces)
    _add_ending(app, tasks, surfaces)


def _add_submitting(app: FastAPI, parts: GatewayParts, tasks: TaskPort, surfaces: Surfaces) -> None:
    async def submit_task(request: Request) -> Response:
        """Accept a request that nobody waits for. Once this answers it is durable.

        202 for a new task; with the `Idempotency-Key` of an earlier one 200 and that task as it is.
        """
        scope = request.scope
        facts_of(scope).surface = SURFACE
        Query(scope)
        raw = await read_json_body(scope, request.receive, parts.config)
        wanted = parse(NewTaskBody, raw, max_depth=parts.config.limits.max_json_depth)
        parts.note(scope, surface=SURFACE, model=model_of(wanted))
        new = await new_task(scope, wanted, surfaces, count=partial(parts.count, scope, tenant_of(scope)))
        accepted = await submitted(tasks, new)
        facts_of(scope).task_id = accepted.task.id
        response = json_response(task_json(accepted.task, surfaces), 200 if accepted.existed else 202)
        response.headers["location"] = f"{PATH}/{accepted.task.id}"
        return response

    extra = json_body(NewTaskBody) | answers(TaskObject, status=202, also=200)
    app.add_api_route(PATH, submit_task, methods=["POST"], status_code=202, tags=["tasks"], openapi_extra=extra)


def _add_reading(app: FastAPI, parts: GatewayParts, tasks: TaskPort, surfaces: Surfaces) -> None:
    async def list_tasks(request: Request) -> Response:
        """Tasks of the caller's tenant, the newest first, a page at a time."""
        scope = request.scope
        facts_of(scope).surface = SURFACE
        query = Query(scope, frozenset(_LIST))
        limit = query.count("limit", MAX_LISTED)
        wanted = TaskQuery(
            states=_states(query),
            model=query.text("model"),
            page_size=limit or DEFAULT_LISTED,
            page_token=query.text("page_token"),
        )
        return json_response(page_json(await tasks.list_page(tenant_of(scope), wanted), surfaces))

    async def get_task(request: Request) -> Response:
        """A task with its attempts; once it is completed with its result: what its endpoint would have answered."""
        tenant, task_id = _asked(request)
        Query(request.scope)
        details = await tasks.details(tenant, task_id)
        body = task_json(details.task, surfaces)
        body["attempts"] = [attempt_json(attempt) for attempt in details.attempts]
        if details.task.state is TaskState.COMPLETED:
            outputs = await _outputs(tasks, details.task, parts.config.task_timeout_seconds)
            try:
                body["result"] = msgspec.Raw(answer_of(details, surfaces, outputs))
            except WeftError as error:
                body["error"] = error_json(error)
        return json_response(body)

    app.add_api_route(PATH, list_tasks, methods=["GET"], tags=["tasks"], openapi_extra=answers(TaskList, query=_LIST))
    app.add_api_route(_ONE, get_task, methods=["GET"], tags=["tasks"], openapi_extra=answers(TaskObject, path="id"))


def _add_watching(app: FastAPI, parts: GatewayParts, tasks: TaskPort, surfaces: Surfaces) -> None:
    async def watch_task(request: Request) -> Response:
        """A task and its answer as server-sent events `task` and `output`, until its end.

        `after`, or the header Last-Event-ID, is the `id` of the last event that the caller has.
        """
        tenant, task_id = _asked(request)
        query = Query(request.scope, frozenset({"after"}))
        after = _after(request.scope, query)
        return EventStream(parts, encoded_news(tasks.watch(tenant, task_id, after), surfaces, after))

    extra = answers(TaskObject, path="id", query=("after",))
    extra["responses"]["200"] = EVENTS
    app.add_api_route(f"{_ONE}/events", watch_task, methods=["GET"], tags=["tasks"], openapi_extra=extra)


def _add_ending(app: FastAPI, tasks: TaskPort, surfaces: Surfaces) -> None:
    async def cancel_task(request: Request) -> Response:
        """End a task, with its backend where it runs. One that is at its end stays as it is."""
        tenant, task_id = _asked(request)
        Query(request.scope)
        return json_response(task_json(await tasks.cancel(tenant, task_id), surfaces))

    async def delete_task(request: Request) -> Response:
        """End a task as `cancel` does; with forget=true forget one that is at its end, and answer 204."""
        tenant, task_id = _asked(request)
        query = Query(request.scope, frozenset({"forget"}))
        if not query.flag("forget"):
            return json_response(task_json(await tasks.cancel(tenant, task_id), surfaces))
        await tasks.delete(tenant, task_id)
        return Response(status_code=204)

    app.add_api_route(
        f"{_ONE}/cancel", cancel_task, methods=["POST"], tags=["tasks"], openapi_extra=answers(TaskObject, path="id")
    )
    extra = answers(TaskObject, path="id", query=("forget",))
    extra["responses"]["204"] = {"description": "Forgotten"}
    app.add_api_route(_ONE, delete_task, methods=["DELETE"], tags=["tasks"], openapi_extra=extra)


async def _outputs(tasks: TaskPort, task: Task, timeout_seconds: float) -> list[task_pb2.TaskOutput]:
    """All that is kept of a completed task's answer.

    Raises SERVICE_UNAVAILABLE where it does not come in time, or not all of it: somebody forgot the task meanwhile.
    """
    try:
        async with asyncio.timeout(timeout_seconds), aclosing(tasks.watch(task.tenant, task.id)) as news:
            pieces = [item async for item in news if isinstance(item, TaskChunk)]
    except TimeoutError:
        raise WeftError(Reason.SERVICE_UNAVAILABLE, "the task's answer could not be read in time") from None
    if task.last_event and (not pieces or pieces[-1].last_event != task.last_event):
        raise WeftError(Reason.SERVICE_UNAVAILABLE, "the task's answer could not be read to its end; ask again")
    return [piece.output for piece in pieces]


def _asked(request: Request) -> tuple[str, str]:
    """Whose task, and which."""
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
    """The last event that the caller has; 0: none. A browser that connects again says it in a header."""
    given = headers_of(scope).get(b"last-event-id")
    if given is not None:
        return _event_number(given.decode("latin-1"), "Last-Event-ID")
    return _event_number(query.text("after"), "after") if "after" in query else 0


def _event_number(text: str, field: str) -> int:
    is_number = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
    if not is_number or int(text) > MAX_EVENT_NUMBER:
        raise invalid_field(field, f"must be a whole number from 0 to {MAX_EVENT_NUMBER}")
    return int(text)
