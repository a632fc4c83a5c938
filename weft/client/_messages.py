"""Builds request messages from plain Python values."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NotRequired, TypedDict, get_args

from weft.api.common.v1 import (
    cache_mode_pb2,
    chat_pb2,
    completion_pb2,
    embedding_pb2,
    priority_pb2,
    sampling_pb2,
)
from weft.api.router.v1 import inference_service_pb2 as pb
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.text.json_objects import to_json_object
from weft.kernel.values.media_types import AUDIO_FORMATS, audio_type_of, image_type_of
from weft.kernel.values.names import MAX_CACHE_TAG_CHARS, MAX_CLIENT_CHARS, MAX_SESSION_CHARS, require_token
from weft.kernel.values.units import keep_alive_seconds

RoleName = Literal["system", "developer", "user", "assistant", "tool"]


class Message(TypedDict):
    """One turn of a conversation."""

    role: RoleName
    content: str
    images: NotRequired[Sequence[bytes]]
    """Encoded image files, placed before the text: PNG, JPEG, WebP, GIF or BMP."""
    audio: NotRequired[Sequence[bytes]]
    """Encoded recordings, placed before the text: WAV, MP3, FLAC, Ogg, MP4, WebM or AAC."""


class HandlingOptions(TypedDict, total=False):
    """Options of all requests."""

    allow_remote: bool
    """Whether the request may be sent to remote models and tools."""
    keep_alive: float | str
    """How long the model stays loaded afterwards: seconds, a duration such as "5m", 0 (unload), -1 (keep)."""
    priority: Literal["high", "normal", "low"]
    """The priority class; default: that of the client's profile, or normal."""
    client_id: str
    """The id of the calling program, for its profile and statistics."""
    session: str
    """Requests of one session go to the same runner if possible; at most 256 characters."""


class ChatOptions(HandlingOptions, total=False):
    """Chat options; the backend has the defaults. Ranges: common/v1/sampling.proto."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop: Sequence[str]
    thinking: bool
    """Whether a reasoning model thinks before it answers."""
    cache_mode: Literal["auto", "prefix", "none"]
    cache_tag: str
    """Requests share cached prefixes only within one tenant and tag; at most 64 characters."""
    extra_parameters: Mapping[str, object]
    """Parameters unknown to weft, as JSON data; the answer has a warning for each unused one."""


_NOT_NUMBERS = frozenset({
    "stop", "thinking", "allow_remote", "extra_parameters", "cache_mode", "cache_tag", "keep_alive", "priority",
    "client_id", "session",
})  # fmt: skip
_PRIORITIES = {
    "high": priority_pb2.PRIORITY_HIGH,
    "normal": priority_pb2.PRIORITY_NORMAL,
    "low": priority_pb2.PRIORITY_LOW,
}
_CACHE_MODES = {
    "auto": cache_mode_pb2.CACHE_MODE_AUTO,
    "prefix": cache_mode_pb2.CACHE_MODE_PREFIX,
    "none": cache_mode_pb2.CACHE_MODE_NONE,
}


def chat_request(model: str, messages: str | Iterable[Message], options: ChatOptions) -> pb.ChatRequest:
    """Returns a chat request; a plain string is one user message. Raises INVALID_ARGUMENT naming the wrong field."""
    turns: Iterable[Message] = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    request = pb.ChatRequest(model=model)
    for index, turn in enumerate(turns):
        if turn["role"] not in get_args(RoleName):
            raise invalid_field(f"messages[{index}].role", f"must be one of {', '.join(get_args(RoleName))}")
        role = chat_pb2.Role.Value(f"ROLE_{turn['role'].upper()}")
        parts = [*_media_parts(turn), chat_pb2.ContentPart(text=turn["content"])]
        request.payload.messages.add(role=role, content=parts)
    if "thinking" in options:
        request.payload.thinking = options["thinking"]
    request.options.CopyFrom(request_options(options))
    _fill_cache_use(request.options, options)
    if "extra_parameters" in options:
        extra = to_json_object(options["extra_parameters"], "extra_parameters")
        request.payload.extra_parameters.CopyFrom(extra)
    _fill_sampling(request.payload.sampling, options)
    return request


def _media_parts(turn: Message) -> Iterator[chat_pb2.ContentPart]:
    for data in turn.get("images", ()):
        media_type = image_type_of(data)
        if media_type is None:
            raise invalid_field("images", "must be PNG, JPEG, WebP, GIF or BMP files")
        yield chat_pb2.ContentPart(image=chat_pb2.MediaPart(data=data, media_type=media_type))
    for data in turn.get("audio", ()):
        media_type = audio_type_of(data)
        if media_type is None:
            raise invalid_field("audio", f"must be {AUDIO_FORMATS} files")
        yield chat_pb2.ContentPart(audio=chat_pb2.MediaPart(data=data, media_type=media_type))


def request_options(options: HandlingOptions) -> pb.RequestOptions:
    """Returns the options of a request. Raises INVALID_ARGUMENT naming an invalid option."""
    handling = pb.RequestOptions(allow_remote=options.get("allow_remote", False))
    if "keep_alive" in options:
        seconds = keep_alive_seconds(options["keep_alive"], "keep_alive")
        handling.keep_alive.FromNanoseconds(math.ceil(seconds * 1e9))
    _fill_caller(handling, options)
    return handling


def _fill_cache_use(handling: pb.RequestOptions, options: ChatOptions) -> None:
    if "cache_mode" in options:
        mode = _CACHE_MODES.get(options["cache_mode"])
        if mode is None:
            raise invalid_field("cache_mode", "must be auto, prefix or none")
        handling.cache_mode = mode
    if "cache_tag" in options:
        handling.cache_tag = require_token(options["cache_tag"], "cache_tag", MAX_CACHE_TAG_CHARS)


def _fill_caller(handling: pb.RequestOptions, options: HandlingOptions) -> None:
    if "priority" in options:
        priority = _PRIORITIES.get(options["priority"])
        if priority is None:
            raise invalid_field("priority", "must be high, normal or low")
        handling.priority = priority
    if "client_id" in options:
        handling.client_id = require_token(options["client_id"], "client_id", MAX_CLIENT_CHARS)
    if "session" in options:
        if len(options["session"]) > MAX_SESSION_CHARS:
            raise invalid_field("session", f"must have at most {MAX_SESSION_CHARS} characters")
        handling.session = options["session"]


def _fill_sampling(sampling: sampling_pb2.SamplingParams, options: ChatOptions) -> None:
    sampling.stop.extend(_texts(options.get("stop", ())))
    for name, value in options.items():
        if name in _NOT_NUMBERS:
            continue
        try:
            setattr(sampling, name, value)
        except (TypeError, ValueError) as error:
            raise invalid_field(name, "is not a number or is out of range") from error


def embed_request(model: str, texts: Sequence[str]) -> pb.EmbedRequest:
    """Returns a request for one embedding per text."""
    inputs = [completion_pb2.PromptInput(text=text) for text in _texts(texts)]
    return pb.EmbedRequest(model=model, payload=embedding_pb2.EmbeddingPayload(inputs=inputs))


def _texts(given: Sequence[str]) -> Sequence[str]:
    """Returns the texts; a single one, which is also a sequence of characters, as one text."""
    return (given,) if isinstance(given, str) else given
