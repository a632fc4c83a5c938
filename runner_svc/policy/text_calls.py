"""Parses tool calls that a model writes as text into its answer. Pure.

Some models write calls in forms that their engine does not parse. These forms are supported:

    <tool_call>{"name": ..., "arguments": {...}}</tool_call>     Hermes, Qwen
    [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]         Mistral
    <function=name>{...}</function>                              Llama 3
    {"name": ..., "parameters": {...}}                           Llama 3; only as the whole answer, fenced or bare

Only offered names are calls, so that an answer in JSON stays an answer.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

MAX_HELD_CHARS = 64 * 1024
"""Maximum length of text that is held back because it may be a call."""

_TAG, _LIST, _FUNCTION = "<tool_call>", "[TOOL_CALLS]", "<function="
_MARKERS = (_TAG, _LIST, _FUNCTION)
_MARKER = re.compile("|".join(map(re.escape, _MARKERS)))
_CLOSERS = {_TAG: "</tool_call>", _LIST: "", _FUNCTION: "</function>"}
_MAX_NAME_CHARS = 64
_MAX_SPACE = 64
"""Maximum whitespace between a marker and its JSON."""
_FENCE = re.compile(r"```(?:json)?[ \t]*\r?\n\s*")
_FENCE_STARTS = ("```json", "```")
_FENCE_END = "```"
_FIRST_KEYS = ("name", "parameters", "arguments", "type")
_KEYS = frozenset({*_FIRST_KEYS, "id"})
"""Keys of a call that is the whole answer; an object with other keys is an answer in JSON."""
_ARGUMENT_KEYS = ("arguments", "parameters")
_WHITESPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class TextCall:
    """A call found in text."""

    name: str
    arguments_text: str
    """A JSON object."""


class _State(Enum):
    START = 1
    """Only whitespace so far; the whole answer may be a call."""
    WHOLE = 2
    """The answer began like a call; decided at its end."""
    TEXT = 3
    """Text in which a marker may follow."""
    MARKED = 4
    """After a marker, before the JSON."""
    JSON = 5
    """Inside the JSON of a marked call."""
    CLOSING = 6
    """After that JSON."""


class TextCallParser:
    """The parser of one turn's text. Its output does not depend on how the text is split into chunks."""

    def __init__(self, offered: Collection[str]) -> None:
        """`offered`: the functions that can be called."""
        self._offered = frozenset(offered)
        self._state = _State.START if self._offered else _State.TEXT
        self._held = ""
        self._marker = ""
        self._name = ""
        self._json_at = 0
        self._extent = JsonExtent()
        self._whole_ended = False
        self._out: list[str | TextCall] = []

    @property
    def holds(self) -> bool:
        """Whether text is held back."""
        return bool(self._held)

    def passes(self, text: str) -> bool:
        """Whether `feed` would return `text` unchanged and hold nothing back, so that it can be skipped."""
        return self._state is _State.TEXT and not self._held and "<" not in text and "[" not in text

    def feed(self, text: str) -> list[str | TextCall]:
        """Takes a chunk; returns text to pass on and calls, in order, that are certain so far.

        Raises TOOL_CALL_INVALID for a marker without a valid call.
        """
        if not self._offered:
            return [text] if text else []
        self._held += text
        while self._step():
            pass
        return self._take_out()

    def finish(self, *, cut_off: bool = False) -> list[str | TextCall]:
        """Ends the answer and returns the rest. Raises TOOL_CALL_INVALID for a marked call without an end.

        `cut_off`: the token limit ended the answer; an incomplete call is then text.
        """
        if self._state is _State.WHOLE:
            self._finish_whole()
        if self._state is _State.JSON and not cut_off:
            raise _invalid("it does not end")
        self._emit(len(self._held))
        self._state = _State.TEXT
        return self._take_out()

    def _finish_whole(self) -> None:
        self._state = _State.TEXT
        call = _whole_call(self._held, self._offered)
        if call is not None:
            self._out.append(call)
            self._held = ""
        while self._step():
            pass

    def _take_out(self) -> list[str | TextCall]:
        out, self._out = self._out, []
        return out

    def _emit(self, count: int) -> None:
        if count:
            self._out.append(self._held[:count])
            self._held = self._held[count:]

    def _step(self) -> bool:
        """Runs one step of the state machine; returns whether more steps are possible with the held text."""
        match self._state:
            case _State.START:
                return self._start()
            case _State.WHOLE:
                return self._whole()
            case _State.TEXT:
                return self._text()
            case _State.MARKED:
                return self._marked()
            case _State.JSON:
                return self._json()
            case _State.CLOSING:
                return self._closing()

    def _start(self) -> bool:
        likely = _may_be_whole_call(self._held, self._offered)
        if likely is None and len(self._held) <= MAX_HELD_CHARS:
            return False
        self._state = _State.WHOLE if likely else _State.TEXT
        self._json_at, self._extent = self._held.find("{"), JsonExtent()
        return True

    def _whole(self) -> bool:
        if not self._whole_ended:
            end = self._extent.feed(self._held[self._json_at :])
            self._whole_ended = end is not None
            self._json_at = len(self._held) if end is None else self._json_at + end
        rest = self._held[self._json_at :].strip(_WHITESPACE)
        if len(self._held) <= MAX_HELD_CHARS and _FENCE_END.startswith(rest):
            return False
        self._state = _State.TEXT
        return True

    def _text(self) -> bool:
        found = _MARKER.search(self._held)
        if found is None:
            self._emit(len(self._held) - _length_of_marker_start(self._held))
            return False
        self._emit(found.start())
        self._marker, self._state = found.group(), _State.MARKED
        return True

    def _marked(self) -> bool:
        at: int | None = len(self._marker)
        self._name = ""
        if self._marker == _FUNCTION:
            at = self._end_of_name(len(self._marker))
        if at is None:
            return False
        rest = self._held[at:].lstrip(_WHITESPACE)
        space = len(self._held) - at - len(rest)
        if not rest and space <= _MAX_SPACE:
            return False
        at += space
        opener = "[" if self._marker == _LIST else "{"
        unknown = self._marker == _FUNCTION and self._name not in self._offered
        if unknown or space > _MAX_SPACE or not rest.startswith(opener):
            # The marker is mentioned, not used.
            self._emit(len(self._marker))
            self._state = _State.TEXT
            return True
        self._json_at, self._extent, self._state = at, JsonExtent(), _State.JSON
        return True

    def _end_of_name(self, start: int) -> int | None:
        """Returns the end of the name after `<function=`, or `start` if it is too long; None: not received yet."""
        end = self._held.find(">", start, start + _MAX_NAME_CHARS + 1)
        if end < 0:
            return None if len(self._held) <= start + _MAX_NAME_CHARS else start
        self._name = self._held[start:end].strip()
        return end + 1

    def _json(self) -> bool:
        end = self._extent.feed(self._held[self._json_at :])
        if end is None:
            self._json_at = len(self._held)
            if len(self._held) > MAX_HELD_CHARS:
                raise _invalid(f"it has more than {MAX_HELD_CHARS} characters")
            return False
        end += self._json_at
        if end > MAX_HELD_CHARS:
            raise _invalid(f"it has more than {MAX_HELD_CHARS} characters")
        calls = self._calls(self._held[len(self._marker) : end])
        if calls is None:
            self._emit(end)
            self._state = _State.TEXT
            return True
        self._out += calls
        self._held = self._held[end:]
        self._state = _State.CLOSING
        return True

    def _calls(self, text: str) -> list[TextCall] | None:
        """Returns the calls in a marked value; None: it names no offered function."""
        if self._marker == _FUNCTION:
            body = text[text.index("{") :]
            return [TextCall(self._name, _json_text(_decoded(body)))]
        value = _decoded(text.strip(_WHITESPACE))
        entries = value if isinstance(value, list) else [value]
        names = [entry.get("name") if isinstance(entry, dict) else None for entry in entries]
        offered = [isinstance(name, str) and name in self._offered for name in names]
        if not any(offered):
            return None
        if not all(offered):
            raise _invalid("it names a function that was not offered")
        calls = [_call_of(entry, self._offered) for entry in entries]
        if not all(calls):
            raise _invalid("its arguments are not a JSON object")
        return [call for call in calls if call is not None]

    def _closing(self) -> bool:
        rest = self._held.lstrip(_WHITESPACE)
        closer = _CLOSERS[self._marker]
        if closer and rest.startswith(closer):
            self._held = rest[len(closer) :]
            # A second closing marker would be text.
            self._marker = _LIST
            return True
        if not rest or (closer and closer.startswith(rest)):
            # Whitespace around calls is dropped, which also limits the held text.
            self._held = rest
            return False
        self._held = rest
        self._state = _State.TEXT
        return True


def _length_of_marker_start(text: str) -> int:
    """Returns the number of characters at the end of `text` that may begin a marker."""
    longest = max(map(len, _MARKERS)) - 1
    for count in range(min(longest, len(text)), 0, -1):
        tail = text[-count:]
        if any(marker.startswith(tail) for marker in _MARKERS):
            return count
    return 0


def _may_be_whole_call(text: str, offered: Collection[str]) -> bool | None:
    """Whether an answer with this beginning may be a call in JSON; None: undecided yet."""
    body = text.lstrip(_WHITESPACE)
    if body.startswith("`") or not body:
        fence = _FENCE.match(body)
        if fence is None:
            return None if _may_become_fence(body) else False
        body = body[fence.end() :]
    if not body:
        return None
    if body[0] != "{":
        return False
    rest = body[1:].lstrip(_WHITESPACE)
    keys = [f'"{key}"' for key in _FIRST_KEYS]
    if any(key.startswith(rest) for key in keys):
        return None
    found = next((key for key in keys if rest.startswith(key)), None)
    if found != '"name"':
        return found is not None
    return _may_name(rest[len(found) :], offered)


def _may_become_fence(body: str) -> bool:
    if any(start.startswith(body) for start in _FENCE_STARTS):
        return True
    start = next((start for start in _FENCE_STARTS if body.startswith(start)), None)
    return start is not None and not body[len(start) :].strip(" \t\r")


def _may_name(text: str, offered: Collection[str]) -> bool | None:
    """Whether `text`, which follows the key "name", gives an offered name; None: undecided yet."""
    rest = text.lstrip(_WHITESPACE)
    if not rest:
        return None
    if rest[0] != ":":
        return False
    value = rest[1:].lstrip(_WHITESPACE)
    names = [f'"{name}"' for name in offered]
    if any(value.startswith(name) for name in names):
        return True
    return None if any(name.startswith(value) for name in names) else False


def _whole_call(text: str, offered: Collection[str]) -> TextCall | None:
    body = text.strip(_WHITESPACE)
    if fence := _FENCE.match(body):
        body = body[fence.end() :]
        if body.endswith(_FENCE_END):
            body = body.removesuffix(_FENCE_END)
    try:
        value = msgspec.json.decode(body.strip(_WHITESPACE))
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(value, dict) or not _KEYS.issuperset(value) or value.keys().isdisjoint(_ARGUMENT_KEYS):
        return None
    return _call_of(value, offered)


def _call_of(value: Any, offered: Collection[str]) -> TextCall | None:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or name not in offered:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        # Some models write the arguments as OpenAI sends them: JSON within a string.
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            return None
    if not isinstance(arguments, dict):
        return None
    return TextCall(name, _json_text(arguments))


def _json_text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _invalid(f"it is not JSON: {error}") from error


def _invalid(why: str) -> WeftError:
    return WeftError(Reason.TOOL_CALL_INVALID, f"the model wrote a tool call that cannot be parsed: {why}")


_MARKS = re.compile(r'["{}\[\]]')
_STRING_MARKS = re.compile(r'["\\]')


class JsonExtent:
    """Finds the end of a JSON object, array or string in a stream by counting brackets. The JSON need not be valid."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._skips = 0

    def feed(self, text: str) -> int | None:
        """Takes the next chunk; returns the number of its characters up to the end of the value, None before the end.

        The first chunk must begin with the opening bracket or quote, and no chunk may follow the end.
        """
        at = self._skips
        while at < len(text):
            found = (_STRING_MARKS if self._in_string else _MARKS).search(text, at)
            if found is None:
                at = len(text)
                break
            at = found.end()
            if self._take(found.group()):
                return at
            if found.group() == "\\":
                # An escaped character is not a mark, in this chunk or the next.
                at += 1
        self._skips = at - len(text)
        return None

    def _take(self, mark: str) -> bool:
        if mark == '"':
            self._in_string = not self._in_string
        elif mark in "{[":
            self._depth += 1
        elif mark in "}]":
            self._depth -= 1
        return self._depth == 0 and not self._in_string
