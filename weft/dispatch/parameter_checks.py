"""Limits and checks of request parameters shared by HTTP, gRPC and declarations.

They cover extra parameters, sizes of rerank, image and audio calls, and request options (cache, keep-alive, priority,
client, session). The limits are those in the proto comments, and OpenAI's where it has one.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from google.protobuf.duration_pb2 import Duration

from weft.api.common.v1 import json_value_pb2
from weft.api.router.v1 import inference_service_pb2
from weft.api.runner.v1 import serve_options_pb2
from weft.kernel.access.principal import OPERATE, Principal
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.requests.placement_request import AGENT_LABELS
from weft.kernel.requests.request_values import CALLER_CLASSES, CacheMode, Handling, Priority
from weft.kernel.text.json_objects import plain_object
from weft.kernel.values.names import (
    AUTO_MODEL,
    KIND_PREFIXES,
    MAX_CACHE_TAG_CHARS,
    MAX_CLIENT_CHARS,
    MAX_SESSION_CHARS,
    require_token,
)
from weft.kernel.values.units import keep_alive_seconds

MAX_DOCUMENTS = 1024
MAX_IMAGES = 10
MAX_SOURCE_IMAGES = 16
MAX_IMAGE_PROMPT_CHARS = 32_000
MAX_IMAGE_STEPS = 1000
MAX_GUIDANCE = 100.0
MAX_IMAGE_SEED = 2**53 - 1
"""The largest integer that JSON readers represent exactly."""
MAX_PARTIAL_IMAGES = 8
MAX_SPEECH_CHARS = 4096
"""Characters of the text to speak, and of its instructions."""
MAX_TRANSCRIPTION_PROMPT_CHARS = 4096
MAX_WORD_CHARS = 64
"""Characters of a voice, language, size or quality."""
MIN_SPEED, MAX_SPEED = 0.25, 4.0
IMAGE_FORMATS = ("png", "jpeg", "webp")
SPEECH_FORMATS = ("mp3", "opus", "aac", "flac", "wav", "pcm")


MAX_EXTRA_FIELDS = 64
MAX_EXTRA_NAME_CHARS = 128
MAX_EXTRA_BYTES = 128 * 1024
"""Names and values together as JSON: enough for a 64 KiB grammar."""

_TOO_LARGE = f"is too large: all unknown parameters together may have {MAX_EXTRA_BYTES} bytes of JSON"
_MOST_FRAMING = 4
"""Upper bound of a message's size relative to its JSON."""

# Incremental, to stop counting once the limit is exceeded.
_steps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).iterencode


def take_bytes(budget: int, name: str, value: Any, field: str) -> int:
    """Returns what is left of `budget` bytes after a member. Raises INVALID_ARGUMENT naming `field` if exceeded."""
    left = budget - len(name.encode()) - len('"":,')
    try:
        for step in _steps(value):
            left -= len(step.encode())
            if left < 0:
                raise invalid_field(field, _TOO_LARGE)
    except ValueError:
        raise invalid_field(field, "contains a number beyond the range of a double") from None
    return left


def check_extra(extra: json_value_pb2.JsonObject, field: str) -> None:
    """Raises INVALID_ARGUMENT naming `field` or a member of it."""
    if len(extra.fields) > MAX_EXTRA_FIELDS:
        raise invalid_field(field, f"must have at most {MAX_EXTRA_FIELDS} members, has {len(extra.fields)}")
    if extra.ByteSize() > MAX_EXTRA_BYTES * _MOST_FRAMING:
        raise invalid_field(field, _TOO_LARGE)
    plain, left = plain_object(extra), MAX_EXTRA_BYTES
    if len(plain) < len(extra.fields):
        raise invalid_field(field, "must not have two members of one name")
    for index, (name, value) in enumerate(plain.items()):
        if not 0 < len(name) <= MAX_EXTRA_NAME_CHARS:
            raise invalid_field(f"{field}.fields[{index}].name", f"must be 1 to {MAX_EXTRA_NAME_CHARS} characters")
        left = take_bytes(left, name, value, f"{field}.{name}")


_NANOSECONDS = 1e9
MAX_PREFIX_SECONDS = 86_400.0
"""Maximum time for which a prefix is expected again."""
_CACHE_MODES = {0: CacheMode.AUTO, **{mode.value: mode for mode in CacheMode}}
Options = inference_service_pb2.RequestOptions | serve_options_pb2.ServeOptions


def serve_options(
    handling: Handling, priority: Priority, *, whole: bool = False, joined_texts: bool = False
) -> serve_options_pb2.ServeOptions:
    """Returns the options to send to a runner.

    `whole`: the answer is read only when complete. `joined_texts`: the reader accepts deltas that join texts.
    """
    options = serve_options_pb2.ServeOptions(
        cache_mode=handling.cache_mode,  # type: ignore[arg-type]  # same numbers
        cache_tag=handling.cache_tag,
        priority=priority.wire,  # type: ignore[arg-type]  # same numbers
        whole=whole,
        joined_texts=joined_texts,
    )
    if handling.keep_alive_seconds is not None:
        options.keep_alive.FromNanoseconds(math.ceil(handling.keep_alive_seconds * _NANOSECONDS))
    if handling.prefix_seconds:
        options.prefix_keep_alive.FromNanoseconds(math.ceil(handling.prefix_seconds * _NANOSECONDS))
    return options


def handling_of(options: Options) -> Handling:
    """Returns the options in a message. Raises INVALID_ARGUMENT naming the field that is out of range."""
    mode = _CACHE_MODES.get(options.cache_mode)
    if mode is None:
        raise invalid_field("options.cache_mode", "must be auto, prefix or none")
    keep_alive = _seconds(options.keep_alive) if options.HasField("keep_alive") else None
    return Handling(
        cache_mode=mode,
        cache_tag=cache_tag(options.cache_tag, "options.cache_tag") if options.cache_tag else "",
        keep_alive_seconds=None if keep_alive is None else keep_alive_seconds(keep_alive, "options.keep_alive"),
        prefix_seconds=prefix_seconds(_seconds(options.prefix_keep_alive), "options.prefix_keep_alive")
        if options.HasField("prefix_keep_alive")
        else 0.0,
    )


def may_keep_alive(principal: Principal, model: str) -> bool:
    """Whether a caller may set how long the model of a request stays loaded, which concerns all callers of the model.

    It needs the scope for loads and unloads; for agents, routes and `auto`, whose models have other names, without a
    limit to names. `model`: as in RequestContext.
    """
    leads_elsewhere = model == AUTO_MODEL or model.startswith(KIND_PREFIXES)
    return principal.may(OPERATE) if leads_elsewhere else principal.may_name(OPERATE, model)


def allowed_handling(handling: Handling, principal: Principal, model: str) -> Handling:
    """Returns the options without a keep-alive that the caller may not set; clients send one by default."""
    if handling.keep_alive_seconds is None or may_keep_alive(principal, model):
        return handling
    return replace(handling, keep_alive_seconds=None, keep_alive_ignored=True)


def prefix_seconds(value: object, field: str) -> float:
    """Returns how long a prefix is expected again, see `keep_alive_seconds`; at most MAX_PREFIX_SECONDS."""
    seconds = keep_alive_seconds(value, field)
    if not 0 <= seconds <= MAX_PREFIX_SECONDS:
        raise invalid_field(field, f"must be at most {MAX_PREFIX_SECONDS:.0f} seconds, and not negative")
    return seconds


def priority_of(options: inference_service_pb2.RequestOptions) -> Priority:
    """Returns the caller's priority class; unset: normal. Raises INVALID_ARGUMENT for one that callers cannot claim."""
    band = Priority.from_wire(options.priority)
    if band is None or band not in CALLER_CLASSES:
        raise invalid_field("options.priority", "must be high, normal or low")
    return band


def client_of(options: inference_service_pb2.RequestOptions) -> str:
    """Returns the client id in the request; empty: none. Raises INVALID_ARGUMENT for an invalid one."""
    return require_token(options.client_id, "options.client_id", MAX_CLIENT_CHARS) if options.client_id else ""


def labels_of(options: inference_service_pb2.RequestOptions) -> Mapping[str, str]:
    """Returns the labels of a coding agent in the request. Raises INVALID_ARGUMENT naming a wrong one."""
    for name, value in options.labels.items():
        if name not in AGENT_LABELS:
            allowed = ", ".join(sorted(AGENT_LABELS))
            raise invalid_field(f"options.labels.{name[:MAX_CLIENT_CHARS]}", f"must be one of {allowed}")
        require_token(value, f"options.labels.{name}", MAX_CLIENT_CHARS)
    return dict(options.labels)


def session_of(options: inference_service_pb2.RequestOptions) -> str:
    """Returns the session in the request; empty: none. Raises INVALID_ARGUMENT for one that is too long."""
    return require_session(options.session, "options.session")


def require_session(text: str, field: str) -> str:
    """Returns `text` if it is a valid session. Raises INVALID_ARGUMENT naming `field`."""
    if len(text) > MAX_SESSION_CHARS:
        raise invalid_field(field, f"must have at most {MAX_SESSION_CHARS} characters")
    return text


def granted_priority_of(options: serve_options_pb2.ServeOptions) -> Priority:
    """Returns the priority class that a service of the mesh sets for a runner; unset: normal."""
    band = Priority.from_wire(options.priority)
    if band is None:
        raise invalid_field("options.priority", "must be high, normal, low, system or durable")
    return band


def cache_tag(text: str, field: str) -> str:
    """Returns `text` if it is a valid cache tag. Raises INVALID_ARGUMENT naming `field`."""
    return require_token(text, field, MAX_CACHE_TAG_CHARS)


def _seconds(duration: Duration) -> float:
    # Duration methods fail for out-of-range values; here these are just too long.
    return duration.seconds + duration.nanos / _NANOSECONDS
