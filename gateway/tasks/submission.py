"""Submission of a durable task: from the body of `POST /api/v1/inference-tasks` to a NewTask."""

import json
import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from starlette.types import Scope

from gateway.intake.headers import headers_of, idempotency_key_of, tenant_of
from gateway.intake.request_model import JsonMap, StrictModel
from gateway.request_facts import facts_of
from gateway.tasks.task_api import SpecContext, TaskApis
from weft.durable.tasks import NewTask, Submitted, TaskPort
from weft.kernel.errors import FieldError, WeftError, invalid_field

MAX_MODEL_CHARS = 256
MAX_ENDPOINT_CHARS = 64
MAX_PENDING_SECONDS = 7 * 86_400
MAX_ATTEMPTS = 100

StateName = Literal["pending", "running", "completed", "failed", "cancelled"]


class NewTaskBody(StrictModel):
    """What is to be done, by nobody's connection."""

    model: Annotated[str, Field(min_length=1, max_length=MAX_MODEL_CHARS)] | None = None
    """For a `body` without one. """
    endpoint: Annotated[str, Field(min_length=1, max_length=MAX_ENDPOINT_CHARS)] = "/v1/chat/completions"
    """Whose request `body` is."""
    body: JsonMap
    """The request, as it would be sent there; `stream` says nothing."""
    pending_limit_seconds: Annotated[float, Field(ge=1, le=MAX_PENDING_SECONDS)] | None = None
    """How long it may wait before each attempt until it fails. Absent: `router.tasks.pending_limit_seconds`."""
    max_attempts: Annotated[int, Field(ge=1, le=MAX_ATTEMPTS)] | None = None
    """Absent: `router.tasks.max_attempts`."""
    wait_for_model: bool = False
    """Whether a name that nothing in the mesh has is accepted, and waited for; otherwise it is 404."""


class TaskErrorObject(BaseModel):
    """Why a task or an attempt came to nothing."""

    code: str
    message: str


class TaskAttemptObject(BaseModel):
    """One time that a task was begun."""

    attempt: int
    claimed_at: str
    ended_at: str | None
    error: TaskErrorObject | None


class TaskObject(BaseModel):
    """A task. Times are RFC 3339 in UTC."""

    id: str
    object: Literal["inference_task"]
    state: StateName
    model: str
    endpoint: str | None
    """Null: it was not submitted over HTTP."""
    batch: str | None
    created_at: str
    started_at: str | None
    ended_at: str | None
    expires_at: str | None
    attempt: int
    max_attempts: int
    last_event: int
    waiting_for: str | None
    error: TaskErrorObject | None
    attempts: list[TaskAttemptObject] | None = None
    """Of one task that is asked for by its id."""
    result: dict[str, Any] | None = None
    """Of one completed task that is asked for by its id: what its endpoint would have answered."""


class TaskList(BaseModel):
    """Some tasks, the newest first."""

    object: Literal["list"]
    data: list[TaskObject]
    next_page_token: str | None
    """For the next page; null at the end."""
    notice: str | None = None
    """What whoever looks after the mesh must know of whoever keeps the tasks; absent: nothing."""


_NANOSECONDS = 1e9
_BODY = "body"
_SPEC = "spec"
_NAMES = (
    ("spec.pending_limit", "pending_limit_seconds"),
    ("spec.max_attempts", "max_attempts"),
    ("spec.payload.", "body."),
    ("spec.", "body."),
)
"""Field names of the task port, and their names in this API."""


async def new_task(scope: Scope, wanted: NewTaskBody, task_apis: TaskApis, *, count: Callable[[], None]) -> NewTask:
    """Returns the task to submit. Raises as `TaskApi.supplied_spec`, `count` and INVALID_ARGUMENT naming the field.

    `count` is called once the body is valid, before media are fetched for it.
    """
    surface = task_apis.of_endpoint(wanted.endpoint)
    key = idempotency_key_of(headers_of(scope))
    raw = json.dumps(_body_of(wanted), ensure_ascii=False, separators=(",", ":")).encode()
    about = SpecContext(scope=scope, field=_BODY, is_repeatable=bool(key), before_fetching=count)
    spec = await surface.supplied_spec(raw, about)
    if wanted.pending_limit_seconds is not None:
        spec.pending_limit.FromNanoseconds(math.ceil(wanted.pending_limit_seconds * _NANOSECONDS))
    spec.max_attempts = wanted.max_attempts or 0
    spec.wait_for_model = wanted.wait_for_model
    return NewTask(tenant=tenant_of(scope), spec=spec, idempotency_key=key, caller=facts_of(scope).principal.name)


async def submitted(tasks: TaskPort, new: NewTask) -> Submitted:
    """Submits the task. Raises as `TaskPort.submit`, with field names of the HTTP body."""
    try:
        return await tasks.submit(new)
    except WeftError as error:
        field = error.metadata.get("field", "")
        name = _own_name(field)
        if name == field:
            raise
        raise FieldError(name, error.message.removeprefix(f"{field}: "), error.reason) from None


def _own_name(field: str) -> str:
    if field in {_SPEC, f"{_SPEC}.origin"}:
        return _BODY
    for theirs, ours in _NAMES:
        if field.startswith(theirs):
            return ours + field.removeprefix(theirs)
    return field


def model_of(wanted: NewTaskBody) -> str:
    """Returns the requested model name, for metrics; empty where there is none."""
    named = wanted.body.get("model", wanted.model)
    return named if isinstance(named, str) else ""


def _body_of(wanted: NewTaskBody) -> dict[str, object]:
    if wanted.model is None:
        return wanted.body
    if wanted.body.get("model", wanted.model) != wanted.model:
        raise invalid_field("model", "is another than that of the body: say it once")
    return {**wanted.body, "model": wanted.model}
