"""Bounds and checks of request parameters that HTTP, gRPC and declarations share.

Sampling parameters, what an agent may ask the mesh to do around its chats, unknown parameters, and the sizes of rerank,
image and audio calls. The numbers are those of the proto comments; OpenAI's own where it has one.
"""

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from weft.api.common.v1 import agent_behaviour_pb2, json_value_pb2, sampling_pb2
from weft.kernel.errors import invalid_field
from weft.kernel.json_objects import plain_object
from weft.kernel.names import require_name

MAX_DOCUMENTS = 1024
MAX_IMAGES = 10
MAX_SOURCE_IMAGES = 16
MAX_IMAGE_PROMPT_CHARS = 32_000
MAX_SPEECH_CHARS = 4096
"""Characters of the text to speak, and of the instructions how."""
MAX_TRANSCRIPTION_PROMPT_CHARS = 4096
MAX_WORD_CHARS = 64
"""A voice, a language, a size, a quality."""
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
    """What is left of `budget` bytes after one more member; raises INVALID_ARGUMENT naming `field` for too much."""
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
