"""`/api/v1/inference-tasks`: what may be submitted, and what is answered."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from gateway.intake.request_model import JsonMap, StrictModel

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
