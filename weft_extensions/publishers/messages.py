"""Messages of the publisher protocol, registrations and results, with size limits (docs/laptops.md)."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.text.line_breaks import escaped
from weft.kernel.values.names import require_name, require_name_of_model

MAX_ERROR_CHARS = 2_000
_FAULTS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_JSON_BREAKS = bytes.maketrans(b"\r\n", b"  ")
_Kind = TypeVar("_Kind")


class RegisteredModel(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A model that a publisher serves."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    pool: Annotated[str, Meta(max_length=256)] = ""
    operations: Annotated[
        tuple[Literal["chat", "completion", "embedding", "rerank"], ...], Meta(min_length=1, max_length=4)
    ] = ("chat",)
    slots: Annotated[int, Meta(ge=1, le=1024)] = 1
    context_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    skills: Annotated[tuple[Literal["text", "image", "audio", "tools"], ...], Meta(max_length=4)] = ()
    remote: bool = False
    upstream_model: Annotated[str, Meta(max_length=512)] = ""


class Registration(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A publisher's registration."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    models: Annotated[tuple[RegisteredModel, ...], Meta(min_length=1)]
    host: Annotated[str, Meta(max_length=255)] = ""
    max_requests: Annotated[int, Meta(ge=1, le=65_536)] | None = None


class Leave(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A publisher's sign-off."""

    grace_seconds: Annotated[float, Meta(ge=0, le=3600)] = 10.0


class _ChunkLine(msgspec.Struct, forbid_unknown_fields=True):
    data: msgspec.Raw = msgspec.Raw()
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
    """A whole answer, or an error with its status."""

    status: int
    body: bytes
    """JSON on one line."""


def read(raw: bytes, kind: type[_Kind], what: str) -> _Kind:
    """Returns a message. Raises INVALID_ARGUMENT or MALFORMED_REQUEST with a message that starts with `what`."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise WeftError(Reason.INVALID_ARGUMENT, f"{what} is not valid: {error}") from None
    except _FAULTS:
        raise WeftError(Reason.MALFORMED_REQUEST, f"{what} is not valid JSON") from None


def read_registration(raw: bytes, max_models: int) -> Registration:
    """Returns a registration. Raises as `read`, and TOO_MANY_RESOURCES for too many models."""
    found = read(raw, Registration, "the registration")
    require_name(found.name, "name")
    if len(found.models) > max_models:
        message = f"{len(found.models)} models are over the limit of {max_models}"
        raise WeftError(Reason.TOO_MANY_RESOURCES, message)
    for index, model in enumerate(found.models):
        model.name = require_name_of_model(model.name, f"models[{index}].name")
        if model.pool:
            model.pool = require_name_of_model(model.pool, f"models[{index}].pool")
    if len({model.name for model in found.models}) < len(found.models):
        raise invalid_field("models", "two models have one name")
    return found


def read_piece(raw: bytes) -> Chunk | Whole | None:
    """Returns one line of a result; None: the publisher is still working. Raises as `read`."""
    line = read(raw, _Line, "the line of the result")
    if sum(kind is not UNSET for kind in (line.chunk, line.body, line.error, line.alive)) != 1:
        raise WeftError(Reason.INVALID_ARGUMENT, "a line of a result has one of: chunk, body, error, alive")
    if isinstance(line.error, str):
        return Whole(line.status or 500, error_body(line.error[:MAX_ERROR_CHARS]))
    if not isinstance(line.body, UnsetType):
        return Whole(line.status or 200, on_one_line(bytes(line.body)))
    if isinstance(line.chunk, UnsetType):
        return None
    data = on_one_line(bytes(line.chunk.data))
    if data and not data.startswith(b"{"):
        raise invalid_field("chunk.data", "must be an object, such as a chunk of OpenAI's chat completions")
    if not data and not line.chunk.done:
        raise invalid_field("chunk", "must have data, or set done")
    return Chunk(data, line.chunk.done)


def error_body(message: str) -> bytes:
    """Returns an error body of OpenAI's API."""
    return msgspec.json.encode({"error": {"message": message}})


def event(name: str, **data: object) -> bytes:
    """Returns an event for a publisher's stream."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), on_one_line(msgspec.json.encode(data)))


def failure_event(name: str, error: WeftError, **data: object) -> bytes:
    """Returns an event that ends a task or the stream."""
    return event(name, **data, code=error.reason.name.lower(), message=error.message)


def on_one_line(raw: bytes) -> bytes:
    """Returns JSON without line breaks, which can only occur between tokens."""
    return escaped(raw.strip().translate(_JSON_BREAKS))


def as_chunk(body: bytes) -> bytes:
    """Converts a whole answer to the only chunk of a stream, with its message as the delta; keeps anything else."""
    try:
        answer: Any = msgspec.json.decode(body)
        for choice in answer["choices"]:
            message = choice.pop("message", None)
            if message is not None:
                choice["delta"] = message
                for index, call in enumerate(message.get("tool_calls") or ()):
                    call.setdefault("index", index)
        if "chat.completion" in str(answer.get("object", "chat.completion")):
            answer["object"] = "chat.completion.chunk"
        return msgspec.json.encode(answer)
    except (msgspec.DecodeError, LookupError, TypeError, AttributeError, ValueError):
        return body
