"""The messages of the publisher protocol: registrations and results, read within bounds; tasks and ends, written.

docs/publishers.md is their reference.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.names import new_id, require_name, require_name_of_model
from weft.kernel.reasons import Reason

ROOT = "/publisher/v1"
SESSION_HEADER = "weft-publisher-session"
PROTOCOL_VERSION = 1
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/embeddings": "embedding",
    "/v1/rerank": "rerank",
}
"""Operations of tasks, by the path of OpenAI's API (of Cohere's for rerank) whose body the task has."""
OperationWord = Literal["chat", "completion", "embedding", "rerank"]
SkillWord = Literal["text", "image", "audio", "tools"]
MAX_SLOTS = 1024
MAX_ERROR_CHARS = 2_000
_FAULTS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_Kind = TypeVar("_Kind")


class RegisteredModel(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One model that a publisher serves."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    pool: Annotated[str, Meta(max_length=256)] = ""
    operations: Annotated[tuple[OperationWord, ...], Meta(min_length=1, max_length=4)] = ("chat",)
    slots: Annotated[int, Meta(ge=1, le=MAX_SLOTS)] = 1
    context_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    skills: Annotated[tuple[SkillWord, ...], Meta(max_length=4)] = ()
    remote: bool = False
    upstream_model: Annotated[str, Meta(max_length=512)] = ""


class Registration(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a publisher registers."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    models: Annotated[tuple[RegisteredModel, ...], Meta(min_length=1)]
    host: Annotated[str, Meta(max_length=255)] = ""
    max_requests: Annotated[int, Meta(ge=1, le=65_536)] | None = None


class Leave(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How a publisher leaves."""

    grace_seconds: Annotated[float, Meta(ge=0, le=3600)] = 10.0


class _ChunkLine(msgspec.Struct, forbid_unknown_fields=True):
    data: msgspec.Raw | UnsetType = UNSET
    done: bool = False


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    chunk: _ChunkLine | UnsetType = UNSET
    status: Annotated[int, Meta(ge=100, le=599)] | UnsetType = UNSET
    body: msgspec.Raw | UnsetType = UNSET
    error: str | UnsetType = UNSET
    alive: bool | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a streamed answer, or its end."""

    data: bytes
    """A JSON object on one line; empty: none."""
    done: bool


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole answer, or a refusal with a status of its own."""

    status: int
    body: bytes
    """JSON on one line."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The publisher cannot answer."""

    message: str
    status: int


@dataclass(frozen=True, slots=True)
class Alive:
    """The publisher works on it."""


Piece = Chunk | Whole | Failed | Alive


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRequest:
    """A request as a publisher gets it."""

    path: str
    model: str
    stream: bool
    request_id: str
    body: bytes
    """A JSON object on one line."""


class _Wanted(msgspec.Struct):
    model: str = ""
    stream: bool = False


def read_registration(raw: bytes, max_models: int) -> Registration:
    """Returns a registration. Raises INVALID_ARGUMENT or MALFORMED_REQUEST; TOO_MANY_RESOURCES for too many models."""
    found = _read(raw, Registration, "the registration")
    require_name(found.name, "name")
    if len(found.models) > max_models:
        message = f"{len(found.models)} models are over the limit of {max_models} (publishers.max_models)"
        raise WeftError(Reason.TOO_MANY_RESOURCES, message)
    for index, model in enumerate(found.models):
        require_name_of_model(model.name, f"models[{index}].name")
        if model.pool:
            require_name_of_model(model.pool, f"models[{index}].pool")
    if len({model.name for model in found.models}) < len(found.models):
        raise invalid_field("models", "two models have one name")
    return found


def read_leave(raw: bytes) -> Leave:
    """Returns how a publisher leaves; an empty body has the defaults."""
    return _read(raw or b"{}", Leave, "the request")


def read_piece(raw: bytes) -> Piece:
    """Returns one line of a result. Raises INVALID_ARGUMENT or MALFORMED_REQUEST."""
    line = _read(raw, _Line, "the line of the result")
    kinds = [
        line.chunk is not UNSET,
        line.body is not UNSET,
        line.error is not UNSET,
        line.alive is not UNSET,
    ]
    if sum(kinds) != 1:
        raise WeftError(Reason.INVALID_ARGUMENT, "a line of a result has one of: chunk, body, error, alive")
    status = 0 if isinstance(line.status, UnsetType) else line.status
    if isinstance(line.error, str):
        return Failed(line.error[:MAX_ERROR_CHARS], status or 500)
    if not isinstance(line.body, UnsetType):
        return Whole(status or 200, on_one_line(bytes(line.body)))
    if isinstance(line.chunk, _ChunkLine):
        return _chunk(line.chunk)
    return Alive()


def _chunk(line: _ChunkLine) -> Chunk:
    data = b"" if isinstance(line.data, UnsetType) else on_one_line(bytes(line.data))
    if data and not data.startswith(b"{"):
        raise invalid_field("chunk.data", "must be an object, such as a chunk of OpenAI's chat completions")
    if not data and not line.done:
        raise invalid_field("chunk", "must have data, or say that the answer is done")
    return Chunk(data, line.done)


def read_task_request(path: str, request_id: str, raw: bytes) -> TaskRequest:
    """Returns the request of a runner as a task. The runner itself wrote it: it is what its client makes of it."""
    wanted = msgspec.json.decode(raw, type=_Wanted)
    return TaskRequest(
        path=path, model=wanted.model, stream=wanted.stream, request_id=request_id, body=on_one_line(raw)
    )


def new_task_id() -> str:
    """Returns the id of a new task."""
    return new_id("ptk")


def task_event(task_id: str, request: TaskRequest) -> bytes:
    """Returns the event that gives a publisher a task."""
    return _event(
        "task",
        {
            "task": task_id,
            "operation": OPERATIONS[request.path],
            "path": request.path,
            "model": request.model,
            "stream": request.stream,
            "request_id": request.request_id,
            "body": msgspec.Raw(request.body),
        },
    )


def cancel_event(task_id: str, error: WeftError) -> bytes:
    """Returns the event that takes a task back."""
    return _event("cancel", {"task": task_id, "code": error.reason.name.lower(), "message": error.message})


def end_event(error: WeftError) -> bytes:
    """Returns the last event of a stream."""
    return _event("end", {"code": error.reason.name.lower(), "message": error.message})


def _event(name: str, data: dict[str, object]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(data))


_JSON_BREAKS = bytes.maketrans(b"\r\n", b"  ")


def on_one_line(raw: bytes) -> bytes:
    """Returns JSON without line breaks, which stand only between its tokens."""
    return raw.strip().translate(_JSON_BREAKS)


def _read(raw: bytes, kind: type[_Kind], what: str) -> _Kind:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise WeftError(Reason.INVALID_ARGUMENT, f"{what} is not valid: {error}") from None
    except _FAULTS:
        raise WeftError(Reason.MALFORMED_REQUEST, f"{what} is no JSON") from None
