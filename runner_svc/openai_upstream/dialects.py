"""Tolerant reader of chunks that deviate from OpenAI's format. Pure.

Content must be readable. Unreadable figures, times, log probabilities and indices count as unknown and never fail an
answer. Unknown fields of messages and calls are passed on to the caller.
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from runner_svc.openai_upstream.chunks import (
    EXTRA,
    MAX_COUNT,
    Chunk,
    ChunkChoice,
    ChunkDelta,
    ChunkLogprobs,
    ChunkToken,
    ChunkTop,
    ChunkUsage,
    CompletionDetails,
    Index,
    Milliseconds,
    PromptDetails,
    PromptProgress,
    Timings,
)
from runner_svc.openai_upstream.errors import JSON_FAULTS, ErrorBody, malformed, stated_answer

MAX_DIGITS = 4_000
_CALL_FIELDS = frozenset({"index", "id", "type", "function"})
_FUNCTION_FIELDS = frozenset({"name", "arguments"})
_DELTA_FIELDS = frozenset(
    {"role", "content", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call", "audio"}
)
_TEXT_PARTS = frozenset({"text", "output_text"})
_THINKING_PARTS = frozenset({"thinking", "reasoning", "reasoning_text"})
_SKIPPED_PARTS = frozenset({"reference", "tool_reference"})
"""Content parts of Mistral's answers that are not text."""

JsonMap = dict[str, Any]
_Kind = TypeVar("_Kind")
_Figures = TypeVar("_Figures", bound=msgspec.Struct)


DIALECT_FAULTS = (ValueError, RecursionError, msgspec.ValidationError)
"""Exceptions that `read_document` and `read_dialect` raise."""


def read_document(payload: bytes) -> JsonMap:
    """Parses the object in a payload that the strict decoder rejected.

    Incomplete characters are kept. NaN, infinity and numbers too large for a float become null.
    """
    text = payload.decode("utf-8", "surrogateescape")
    return _object(json.loads(text, parse_int=_integer, parse_float=_finite, parse_constant=lambda _: None))


def read_json(raw: bytes, kind: type[_Kind], what: str) -> _Kind:
    """Decodes `raw` as `kind`. Numbers that `read_document` reads as null are null here too.

    Raises the error that the response states, else BACKEND_PROTOCOL_ERROR with a message that starts with `what`
    ("the engine's scores are").
    """
    try:
        return msgspec.json.decode(raw, type=kind)
    except JSON_FAULTS as error:
        fault = error
    try:
        return msgspec.json.decode(msgspec.json.encode(read_document(raw)), type=kind)
    except DIALECT_FAULTS:
        raise (stated_answer(raw) or malformed(f"{what} malformed:", fault)) from fault


def read_dialect(document: JsonMap) -> Chunk:
    """Converts an object to a chunk."""
    return Chunk(
        choices=[_choice(choice) for choice in _some(document.get("choices"))],
        usage=usage_of(document.get("usage")),
        timings=_figures(Timings, document.get("timings"), _milliseconds),
        metrics=_raw(document.get("metrics")),
        prompt_progress=_figures(PromptProgress, document.get("prompt_progress"), count_of),
        error=msgspec.json.decode(_plain_json(document.get("error")), type=ErrorBody | str | None),
    )


def count_of(value: object) -> int | None:
    """Returns a token count; None: the value is not one."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT
    return value if is_count else None  # type: ignore[return-value]  # is_count narrows it


def figure(usage: object, *names: str) -> int:
    """Returns the first of the named figures that is valid and not 0; 0: none."""
    return next((count for name in names if (count := count_of(_map(usage).get(name)))), 0)


def usage_of(value: object) -> ChunkUsage | None:
    """Returns the readable figures; None: there are none."""
    if not isinstance(value, dict):
        return None
    prompt, completion, total = (
        count_of(value.get(name)) for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    )
    if total is not None and prompt is None:
        prompt = max(0, total - (completion or 0))
    if total is not None and completion is None:
        completion = max(0, total - (prompt or 0))
    if prompt is None and completion is None:
        return None
    return ChunkUsage(
        prompt_tokens=prompt or 0,
        completion_tokens=completion or 0,
        prompt_tokens_details=_figures(PromptDetails, value.get("prompt_tokens_details"), count_of),
        completion_tokens_details=_figures(CompletionDetails, value.get("completion_tokens_details"), count_of),
    )


def _choice(source: object) -> ChunkChoice:
    value = _object(source)
    delta = value.get("delta")
    return ChunkChoice(
        index=_index(value.get("index")),
        delta=None if delta is None else read_delta(_object(delta)),
        text=msgspec.convert(value.get("text"), str | None),
        finish_reason=_finish_reason(value.get("finish_reason")),
        logprobs=_logprobs(value.get("logprobs")),
        stop_reason=value.get("stop_reason"),
        matched_stop=value.get("matched_stop"),
        message=_raw(value.get("message")),
    )


def _index(value: object) -> int:
    """Returns a choice index; 0 if the value is not a number. Raises ValueError if it is out of range."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0
    return msgspec.convert(int(value) if float(value).is_integer() else value, Index)


def _finish_reason(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value) if value else None


def read_delta(value: JsonMap) -> ChunkDelta:
    """Returns the delta in an object: a delta, or the message that replaces it."""
    content, thinking = _texts(value.get("content"), "content")
    reasoning, _ = _texts(value.get("reasoning_content"), "reasoning_content", is_thinking=True)
    other = value.get("reasoning")  # an object on some servers
    calls = [_call(call) for call in _some(value.get("tool_calls"))]
    if isinstance(older := value.get("function_call"), dict):
        calls.append(_call({"function": older}))
    role = value.get("role")
    delta = msgspec.convert(
        {
            "role": role if isinstance(role, str) else None,
            "content": content,
            "reasoning_content": thinking + (reasoning or "") or None,
            "reasoning": other if isinstance(other, str) else None,
            "refusal": value.get("refusal"),
            "tool_calls": calls,
        },
        ChunkDelta,
    )
    delta.extra = _unknown(value, _DELTA_FIELDS)
    return delta


def _texts(value: object, name: str, *, is_thinking: bool = False) -> tuple[str | None, str]:
    """Returns the text and the reasoning of a string or of a list of parts as Mistral's models send it.

    Raises ValueError for anything else.
    """
    if value is None or isinstance(value, str):
        return value, ""
    texts, thoughts = [], []
    for part in [value] if isinstance(value, dict) else _list(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, str):
            texts.append(part)
        elif kind in _TEXT_PARTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind in _THINKING_PARTS and not is_thinking:
            found = next((part[key] for key in ("thinking", "reasoning", "text") if part.get(key)), "")
            thought, _ = _texts(found, name, is_thinking=True)
            thoughts.append(thought or "")
        elif kind not in _SKIPPED_PARTS:
            raise ValueError(f"{name} has a part that is not text")
    return "".join(texts), "".join(thoughts)


def _call(source: object) -> JsonMap:
    value = _object(source)
    function = _object(value.get("function") or {})
    arguments = function.get("arguments")
    if arguments == []:
        arguments = {}  # PHP encodes an empty object as an empty list
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    extra = _unknown(value, _CALL_FIELDS)
    if of_function := _unknown(function, _FUNCTION_FIELDS):
        extra["function"] = of_function
    return {
        "index": None if (index := count_of(value.get("index"))) is None or index >= 2**31 else index,
        "id": _id(value.get("id")),
        "function": {"name": function.get("name"), "arguments": arguments},
        EXTRA: extra,
    }


def _id(value: object) -> str | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value if isinstance(value, str) else None


def _logprobs(value: object) -> ChunkLogprobs | None:
    entries = _map(value).get("content")
    if not isinstance(entries, list):
        return None
    return ChunkLogprobs(content=[_token(entry) for entry in entries if _has_token(entry)])


def _token(entry: JsonMap) -> ChunkToken:
    tops = entry.get("top_logprobs")
    top = [ChunkTop(**_likelihood(each)) for each in tops if _has_token(each)] if isinstance(tops, list) else None
    return ChunkToken(**_likelihood(entry), top_logprobs=top)


def _has_token(entry: object) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("token"), str)


def _likelihood(entry: JsonMap) -> JsonMap:
    """Returns the fields of a token; an unknown log probability becomes negative infinity."""
    logprob, raw = entry.get("logprob"), entry.get("bytes")
    known = float(logprob) if isinstance(logprob, int | float) else -math.inf
    is_bytes = isinstance(raw, list) and all(type(each) is int and 0 <= each < 256 for each in raw)
    token = entry["token"].encode("utf-8", "replace").decode()
    return {"token": token, "logprob": known, "bytes": raw if is_bytes else None}


def _figures(kind: type[_Figures], value: object, read: Callable[[object], float | None]) -> _Figures | None:
    """Returns the readable figures; None: there are none."""
    found = {name: read(_map(value).get(name)) for name in kind.__struct_fields__}
    known = {name: figure for name, figure in found.items() if figure is not None}
    return kind(**known) if known else None


def _milliseconds(value: object) -> float | None:
    try:
        return msgspec.convert(value, Milliseconds)
    except msgspec.ValidationError:
        return None


def _list(value: object) -> list[Any]:
    return [] if value is None else msgspec.convert(value, list[Any])


def _some(value: object) -> list[Any]:
    """Returns the members of a list without nulls; empty for null and {}."""
    return [] if value in (None, {}) else [member for member in _list(value) if member is not None]


def _object(value: object) -> JsonMap:
    return msgspec.convert(value, JsonMap)


def _map(value: object) -> JsonMap:
    return value if isinstance(value, dict) else {}


def _unknown(value: Mapping[str, Any], known: frozenset[str]) -> JsonMap:
    """Returns the unknown, non-empty fields."""
    return {name: member for name, member in value.items() if name not in known and member not in (None, [], {}, "")}


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(b"" if value is None else _plain_json(value))


def _plain_json(value: object) -> bytes:
    """Returns a value as JSON without incomplete characters."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")


def _integer(digits: str) -> int | None:
    return int(digits) if len(digits) <= MAX_DIGITS else None


def _finite(digits: str) -> float | None:
    number = float(digits)
    return number if math.isfinite(number) else None
