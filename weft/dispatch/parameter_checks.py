"""Bounds and checks of request parameters that HTTP, gRPC and declarations share.

Sampling parameters, behaviour of agents, unknown parameters, sizes of rerank, image and audio calls, and the options of
a request (cache, keep-alive, priority, client, session) as messages. The numbers are those of the proto comments;
OpenAI's own where it has one.
"""

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from google.protobuf.duration_pb2 import Duration

from weft.api.common.v1 import agent_behaviour_pb2, json_value_pb2, sampling_pb2
from weft.api.router.v1 import inference_service_pb2
from weft.api.runner.v1 import serve_options_pb2
from weft.kernel.errors import invalid_field
from weft.kernel.json_objects import plain_object
from weft.kernel.names import MAX_CACHE_TAG_CHARS, MAX_CLIENT_CHARS, MAX_SESSION_CHARS, require_name, require_token
from weft.kernel.request import CALLER_BANDS, CacheMode, Handling, Priority
from weft.kernel.units import keep_alive_seconds

MAX_DOCUMENTS = 1024
MAX_IMAGES = 10
MAX_SOURCE_IMAGES = 16
MAX_IMAGE_PROMPT_CHARS = 32_000
MAX_SPEECH_CHARS = 4096
"""Characters of the text to speak, and of the instructions how."""
MAX_TRANSCRIPTION_PROMPT_CHARS = 4096
MAX_WORD_CHARS = 64
"""Length of a voice, language, size or quality."""
MIN_SPEED, MAX_SPEED = 0.25, 4.0
IMAGE_FORMATS = ("png", "jpeg", "webp")
SPEECH_FORMATS = ("mp3", "opus", "aac", "flac", "wav", "pcm")


MAX_EXTRA_FIELDS = 64
MAX_EXTRA_NAME_CHARS = 128
MAX_EXTRA_BYTES = 128 * 1024
"""Names and values together, as JSON: room for a grammar of 64 KiB."""

_TOO_LARGE = f"is too large: all such parameters together may be {MAX_EXTRA_BYTES} bytes of JSON"
_MOST_FRAMING = 4
"""A message takes less than this times the bytes of its JSON."""

# Step by step, so that the size of something huge is not counted to its end.
_steps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).iterencode


def take_bytes(budget: int, name: str, value: Any, field: str) -> int:
    """Returns the rest of `budget` bytes after one more member; raises INVALID_ARGUMENT naming `field` for too much."""
    left = budget - len(name.encode()) - len('"":,')
    try:
        for step in _steps(value):
            left -= len(step.encode())
            if left < 0:
                raise invalid_field(field, _TOO_LARGE)
    except ValueError:
        raise invalid_field(field, "holds a number beyond the range of a double") from None
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


MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1_024
MAX_LOGIT_BIAS_ENTRIES = 300
MAX_LOGIT_BIAS = 100

_RANGES: dict[str, tuple[float, float]] = {
    "max_tokens": (1, 2**31 - 1),
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (0, 2**31 - 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repeat_penalty": (0, 2),
}


def check_sampling(sampling: sampling_pb2.SamplingParams, field: str) -> None:
    """Raises INVALID_ARGUMENT naming the parameter below `field`."""
    for name, (low, high) in _RANGES.items():
        if sampling.HasField(name):  # type: ignore[arg-type]  # the names are fields, see _RANGES
            _check_number(f"{field}.{name}", getattr(sampling, name), low, high)
    _check_count(f"{field}.stop", len(sampling.stop), MAX_STOP_STRINGS)
    for index, stop in enumerate(sampling.stop):
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            raise invalid_field(f"{field}.stop[{index}]", f"must be 1 to {MAX_STOP_CHARS} characters")
    _check_count(f"{field}.logit_bias", len(sampling.logit_bias), MAX_LOGIT_BIAS_ENTRIES)
    for token, bias in sampling.logit_bias.items():
        _check_number(f"{field}.logit_bias[{token}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)


def _check_number(field: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise invalid_field(field, f"must be {low:g} to {high:g}")


def _check_count(field: str, count: int, most: int) -> None:
    if count > most:
        raise invalid_field(field, f"must have at most {most} entries, has {count}")


MAX_AGENT_TOOLS = 64
MAX_AGENT_SIGNALS = 64
MAX_TOOL_ITERATIONS = 64
MAX_SIGNAL_NAME_CHARS = 64
SIGNAL_NAME_PATTERN = r"^[A-Z][A-Z0-9_]{0,63}$"
SIGNAL_NAME_RULE = f"must be 1 to {MAX_SIGNAL_NAME_CHARS} capital letters, digits or '_', starting with a letter"

_SIGNAL_NAME = re.compile(r"[A-Z][A-Z0-9_]{0,63}")


def is_signal_name(text: str) -> bool:
    """Whether `text` may name a control signal."""
    return _SIGNAL_NAME.fullmatch(text) is not None


def check_behaviour(behaviour: agent_behaviour_pb2.AgentBehaviour, field: str) -> None:
    """Raises INVALID_ARGUMENT naming the part below `field`."""
    _check_list(behaviour.tools, f"{field}.tools", MAX_AGENT_TOOLS)
    for index, name in enumerate(behaviour.tools):
        require_name(name, f"{field}.tools[{index}]")
    if behaviour.HasField("max_tool_iterations") and not 0 <= behaviour.max_tool_iterations <= MAX_TOOL_ITERATIONS:
        raise invalid_field(f"{field}.max_tool_iterations", f"must be 0 to {MAX_TOOL_ITERATIONS}")
    _check_list(behaviour.signals, f"{field}.signals", MAX_AGENT_SIGNALS)
    for index, name in enumerate(behaviour.signals):
        if not is_signal_name(name):
            raise invalid_field(f"{field}.signals[{index}]", SIGNAL_NAME_RULE)
    if behaviour.repetition_policy not in agent_behaviour_pb2.RepetitionPolicy.values():
        raise invalid_field(f"{field}.repetition_policy", "must be off, warn or kill")


def _check_list(names: Sequence[str], field: str, most: int) -> None:
    if len(names) > most:
        raise invalid_field(field, f"must have at most {most} entries, has {len(names)}")
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen:
            raise invalid_field(f"{field}[{index}]", "must not appear twice")
        seen.add(name)


_NANOSECONDS = 1e9
_CACHE_MODES = {0: CacheMode.AUTO, **{mode.value: mode for mode in CacheMode}}
Options = inference_service_pb2.RequestOptions | serve_options_pb2.ServeOptions


def serve_options(handling: Handling, priority: Priority, *, whole: bool = False) -> serve_options_pb2.ServeOptions:
    """The options sent to a runner. `whole`: the answer is not read before it is complete."""
    options = serve_options_pb2.ServeOptions(
        cache_mode=handling.cache_mode.value,  # type: ignore[arg-type]  # same numbers
        cache_tag=handling.cache_tag,
        priority=priority.wire,  # type: ignore[arg-type]  # same numbers
        whole=whole,
    )
    if handling.keep_alive_seconds is not None:
        options.keep_alive.FromNanoseconds(math.ceil(handling.keep_alive_seconds * _NANOSECONDS))
    return options


def handling_of(options: Options) -> Handling:
    """Reads the options of a message. Raises INVALID_ARGUMENT naming the field that is out of range."""
    mode = _CACHE_MODES.get(options.cache_mode)
    if mode is None:
        raise invalid_field("options.cache_mode", "must be auto, prefix or none")
    keep_alive = _seconds(options.keep_alive) if options.HasField("keep_alive") else None
    return Handling(
        cache_mode=mode,
        cache_tag=cache_tag(options.cache_tag, "options.cache_tag") if options.cache_tag else "",
        keep_alive_seconds=None if keep_alive is None else keep_alive_seconds(keep_alive, "options.keep_alive"),
    )


def priority_of(options: inference_service_pb2.RequestOptions) -> Priority:
    """Returns the caller's priority class; unset: normal. Raises INVALID_ARGUMENT for one that callers cannot claim."""
    band = Priority.from_wire(options.priority)
    if band is None or band not in CALLER_BANDS:
        raise invalid_field("options.priority", "must be high, normal or low")
    return band


def client_of(options: inference_service_pb2.RequestOptions) -> str:
    """The client id that the caller states; empty: none. Raises INVALID_ARGUMENT for an invalid one."""
    return require_token(options.client_id, "options.client_id", MAX_CLIENT_CHARS) if options.client_id else ""


def session_of(options: inference_service_pb2.RequestOptions) -> str:
    """Returns the caller's session; empty: none. Raises INVALID_ARGUMENT for one that is too long."""
    return require_session(options.session, "options.session")


def require_session(text: str, field: str) -> str:
    """Return `text` if it may name a session; otherwise raise INVALID_ARGUMENT naming `field`."""
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
    """Return `text` if it may be a cache tag; otherwise raise INVALID_ARGUMENT naming `field`."""
    return require_token(text, field, MAX_CACHE_TAG_CHARS)


def _seconds(duration: Duration) -> float:
    # Beyond what a Duration may hold, its own arithmetic fails; here such a length is only too long.
    return duration.seconds + duration.nanos / _NANOSECONDS
