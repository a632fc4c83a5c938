"""Normalization of streamed tool calls, and of the names and schemas of tools for engines.

Servers give parallel calls the same index or none, and reuse, omit or change their ids. The result has one index, one
unique id and one name per call, and `{}` for missing arguments. Arguments encoded as a JSON string are decoded;
arguments that every chunk repeats from the start are sent once.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from runner_svc.openai_upstream.chunks import ChunkToolCall
from runner_svc.policy.parameters import ParameterWarning
from runner_svc.policy.text_calls import JsonExtent
from weft.api.common.v1 import chat_pb2, event_pb2, json_value_pb2
from weft.dispatch.frames import Frame
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.schemas.json_schema import MAP_KEYS, SCHEMA_TYPES
from weft.kernel.text.json_objects import to_json_object
from weft.kernel.values.names import new_id

MAX_CALLS = 1_024
"""Maximum number of calls in a choice."""
NO_ARGUMENTS = "{}"
_NULL = "null"
"""Sent by some servers for a call without arguments."""
_OPENERS = ("{", '"')
_TOO_DEEP = "recursion limit exceeded"
"""The parser's error for JSON nested deeper than about 200 levels, which may be valid."""


class _Arguments:
    """The arguments of one call. `add` accepts a piece; `take` and finally `end` return the text to pass on.

    A piece is treated as a repetition of all earlier text only if the concatenation cannot be JSON.
    """

    def __init__(self) -> None:
        self._pieces: list[str] = []
        """The text so far, without repetitions."""
        self._passed = 0
        """Number of pieces passed on."""
        self._latest = ""
        """The latest piece without leading whitespace."""
        self._repeats: bool | None = None
        """Whether each piece repeats all earlier text; None: unknown."""
        self._extent = JsonExtent()
        self.is_whole = False
        """Whether the text is a complete JSON object, quoted or not."""

    def __str__(self) -> str:
        return "".join(self._pieces)

    def add(self, piece: str) -> None:
        text = piece.lstrip()
        if not piece or (not text and (self._repeats or not self._pieces)):
            return
        if self._pieces and self._repeats is None:
            self._decide(text)
        if self.is_repeated_by(text):
            self._append(text[len(self._latest) :])
        else:
            self._append(piece if self._pieces else text)
        self._latest = text

    def is_repeated_by(self, piece: str) -> bool:
        """Whether pieces repeat all earlier text, including this one."""
        return self._repeats is True and piece.lstrip().startswith(self._latest)

    def take(self) -> str:
        """Returns the text that can be passed on: not `null`, an incomplete quoted text, or ambiguous pieces."""
        is_doubtful = self._repeats is None and len(self._pieces) > 1
        if is_doubtful or (self._is_quoted and not self.is_whole):
            return ""
        text = self._rest(is_cut=False)
        if not self._passed and _NULL.startswith(text.strip()):
            return ""
        self._passed = len(self._pieces)
        return text

    def end(self, *, is_cut: bool) -> str:
        """Returns the remaining text; `{}` if there were no arguments, unless the answer was cut off."""
        if self._repeats is None and len(self._pieces) > 1 and _is_object(self._latest):
            self._restart([self._pieces[0], self._latest[len(self._pieces[0]) :]])
        text = self._rest(is_cut=is_cut)
        if self._passed or not _NULL.startswith(text.strip()):
            return text
        return "" if is_cut else NO_ARGUMENTS

    @property
    def _is_quoted(self) -> bool:
        return not self._passed and bool(self._pieces) and self._pieces[0].startswith('"')

    def _rest(self, *, is_cut: bool) -> str:
        text = "".join(self._pieces[self._passed :])
        return _unquoted(text, is_cut=is_cut) if self._is_quoted else text

    def _decide(self, piece: str) -> None:
        if not (piece.startswith(self._latest) and piece.startswith(_OPENERS)):
            self._repeats = False
            return
        begins_json = _may_begin_json(str(self) + piece)
        if begins_json is None:
            self._repeats = False
        elif not begins_json:
            self._repeats = True
            self._restart(self._pieces[:1])
            self._latest = self._pieces[0]

    def _restart(self, pieces: list[str]) -> None:
        self._pieces, self._extent, self.is_whole = [], JsonExtent(), False
        for piece in pieces:
            self._append(piece)

    def _append(self, piece: str) -> None:
        self._pieces.append(piece)
        self.is_whole = self.is_whole or self._extent.feed(piece) is not None


def _may_begin_json(text: str) -> bool | None:
    """Whether a text can be the start of JSON; None: it is nested too deeply to tell."""
    end = JsonExtent().feed(text)
    if end is not None and text[end:].strip():
        return False
    try:
        from_json(text, allow_partial="trailing-strings")
    except ValueError as error:
        return None if _TOO_DEEP in str(error) else False
    return True


def _is_object(text: str) -> bool:
    try:
        return isinstance(from_json(text), dict)
    except ValueError:
        return False


def _unquoted(text: str, *, is_cut: bool) -> str:
    """Returns the object in a JSON string, or the start of one in a cut-off string; other text unchanged."""
    try:
        inner = from_json(text, allow_partial="trailing-strings" if is_cut else False)
    except ValueError:
        return text
    is_empty = inner.strip() in {"", _NULL}
    return inner if is_empty or _is_object(inner) or (is_cut and _may_begin_json(inner)) else text


@dataclass(slots=True, kw_only=True)
class _Call:
    number: int
    index: int | None
    """The server's index; None: none yet."""
    chunk: int
    """Number of the chunk in which the call started."""
    sent_id: str = ""
    """The id from the server."""
    name: str = ""
    arguments: _Arguments = field(default_factory=_Arguments)
    extra: dict[str, Any] = field(default_factory=dict)
    """Unknown fields not yet passed on."""

    def is_repeated_by(self, piece: ChunkToolCall) -> bool:
        """Whether a piece only repeats the complete call."""
        is_same = bool(piece.id) and piece.id == self.sent_id and piece.arguments.strip() == str(self.arguments).strip()
        return is_same or self.arguments.is_repeated_by(piece.arguments)


class ToolCallNormalizer:
    """The tool calls of one choice. Call `take` for each chunk with pieces of calls, and `end` after the answer.

    A new name, or a new id with a name, starts a call regardless of its index. So does a repeated name after complete
    arguments or within one chunk. A piece with neither continues the last call of its index.
    """

    def __init__(self, used_ids: Collection[str] = ()) -> None:
        """`used_ids`: ids in the conversation so far, which are not reused."""
        self._used_ids = set(used_ids)
        self._calls: list[_Call] = []
        self._by_index: dict[int, _Call] = {}
        self._last: _Call | None = None
        self._chunks = 0
        self._named = 0

    def take(self, pieces: Sequence[ChunkToolCall]) -> list[event_pb2.ToolCallDelta]:
        """Processes the pieces of a chunk; returns what to pass on. Raises BACKEND_PROTOCOL_ERROR over MAX_CALLS."""
        self._chunks += 1
        return [delta for piece in pieces if (delta := self._take(piece)) is not None]

    def end(self, *, cut_off: bool) -> list[event_pb2.ToolCallDelta]:
        """Ends the answer; returns the remaining arguments. Raises TOOL_CALL_INVALID for a call without a name.

        `cut_off`: the answer was cut off, so arguments may be incomplete.
        """
        found: list[event_pb2.ToolCallDelta] = []
        for call in self._calls:
            if not call.name:
                if cut_off or not str(call.arguments):
                    continue
                raise WeftError(Reason.TOOL_CALL_INVALID, "the model called a function without naming it")
            if text := call.arguments.end(is_cut=cut_off):
                found.append(event_pb2.ToolCallDelta(index=call.number, arguments_text=text))
        return found

    def _take(self, piece: ChunkToolCall) -> event_pb2.ToolCallDelta | None:
        call = self._continued(piece)
        if call is None:
            call = self._begin(piece)
        elif piece.name and call.arguments.is_whole and call.is_repeated_by(piece):
            return None
        if piece.index is not None:
            call.index = piece.index
            self._by_index[piece.index] = call
        self._last = call
        call.arguments.add(piece.arguments)
        call.extra |= piece.extra
        if not call.name and piece.name:
            return self._introduce(call, piece)
        # Arguments are held back until the name is known.
        text = call.arguments.take() if call.name else ""
        return _delta(call, text) if text or (call.name and call.extra) else None

    def _begin(self, piece: ChunkToolCall) -> _Call:
        if len(self._calls) >= MAX_CALLS:
            message = f"the engine sent over {MAX_CALLS:,} tool calls in one answer"
            raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, message)
        call = _Call(number=-1, index=piece.index, chunk=self._chunks, sent_id=piece.id or "")
        self._calls.append(call)
        return call

    def _introduce(self, call: _Call, piece: ChunkToolCall) -> event_pb2.ToolCallDelta:
        call.name, call.number = piece.name, self._named
        self._named += 1
        call.sent_id = call.sent_id or piece.id or ""
        fresh = call.sent_id if call.sent_id and call.sent_id not in self._used_ids else new_id("call")
        self._used_ids.add(fresh)
        delta = _delta(call, call.arguments.take())
        delta.id, delta.name = fresh, call.name
        return delta

    def _continued(self, piece: ChunkToolCall) -> _Call | None:
        """Returns the call that a piece continues; None: it starts a call."""
        call = self._current(piece)
        if call is None or self._begins_another(call, piece):
            return None
        return call

    def _current(self, piece: ChunkToolCall) -> _Call | None:
        """Returns the latest call that a piece may belong to, by index and id."""
        call = self._last if piece.index is None else self._by_index.get(piece.index)
        if piece.id and (call is None or call.sent_id != piece.id) and not piece.name:
            same_id = (known for known in reversed(self._calls) if known.sent_id == piece.id)
            call = next(same_id, call)
        if call is None and not (piece.id or piece.name) and self._last is not None and self._last.index is None:
            # The server sends an index only with pieces that continue a call.
            call = self._last
        return call

    def _begins_another(self, call: _Call, piece: ChunkToolCall) -> bool:
        has_new_id = bool(piece.id and call.sent_id) and piece.id != call.sent_id
        if not piece.name:
            # Some servers generate an id for every piece.
            return has_new_id and call.arguments.is_whole
        if not call.name:
            return has_new_id
        if has_new_id or piece.name != call.name:
            return True
        if call.chunk == self._chunks:
            return call.arguments.is_whole or not piece.id
        begins_anew = call.arguments.is_whole and piece.arguments.lstrip().startswith(_OPENERS)
        return begins_anew and not call.is_repeated_by(piece)


def _delta(call: _Call, text: str) -> event_pb2.ToolCallDelta:
    """Returns the delta of a call with its pending unknown fields."""
    delta = event_pb2.ToolCallDelta(index=call.number, arguments_text=text)
    if (extra := as_message(call.extra)) is not None:
        delta.extra_fields.CopyFrom(extra)
    call.extra = {}
    return delta


def as_message(extra: dict[str, Any]) -> json_value_pb2.JsonObject | None:
    """Returns unknown fields as a message; None: there are none, or they cannot be represented."""
    if not extra:
        return None
    try:
        return to_json_object(extra, "extra_fields")
    except (WeftError, ValueError):  # nested too deeply, or half a character
        return None


Json = dict[str, Any]

MAX_PROVIDER_NAME_CHARS = 64
"""Maximum length of a function name in OpenAI's API."""
_FOREIGN_TO_PROVIDERS = re.compile(r"[^A-Za-z0-9_-]")
_FOREIGN_TO_ENGINES = re.compile(r"[^A-Za-z0-9_.-]")
_SCHEMA_WORDS = re.compile(
    r"schema|grammar|parser for this template|function_?(declaration|parameter)s|tools?[\[.]", re.IGNORECASE
)
_KEPT = frozenset({"type", "description", "properties", "required", "items", "enum", "anyOf"})
"""Schema keywords that every engine supports."""


def engine_names(payload: chat_pb2.ChatPayload, *, is_strict: bool) -> Mapping[str, str]:
    """Returns replacements for the function names in a chat that its engine may reject.

    Engines accept letters, digits, `_`, `-` and `.`; a strict API no dots, and at most MAX_PROVIDER_NAME_CHARS. MCP
    servers also use names such as `files/read`.
    """
    names = [tool.function.name for tool in payload.tools]
    names += [call.name for message in payload.messages for call in message.tool_calls]
    if not names:
        return {}
    foreign = _FOREIGN_TO_PROVIDERS if is_strict else _FOREIGN_TO_ENGINES
    taken = {name for name in names if not foreign.search(name) and not (is_strict and _is_long(name))}
    found: dict[str, str] = {}
    for name in names:
        if name in taken or name in found:
            continue
        plain, count = foreign.sub("_", name)[:MAX_PROVIDER_NAME_CHARS], 1
        while plain in taken:
            count += 1
            end = f"_{count}"
            plain = foreign.sub("_", name)[: MAX_PROVIDER_NAME_CHARS - len(end)] + end
        taken.add(plain)
        found[name] = plain
    return found


def _is_long(name: str) -> bool:
    return len(name) > MAX_PROVIDER_NAME_CHARS


def with_names(payload: chat_pb2.ChatPayload, names: Mapping[str, str]) -> chat_pb2.ChatPayload:
    """Returns a copy of a chat with renamed functions."""
    copy = chat_pb2.ChatPayload()
    copy.CopyFrom(payload)
    for tool in copy.tools:
        tool.function.name = names.get(tool.function.name, tool.function.name)
    for message in copy.messages:
        for call in message.tool_calls:
            call.name = names.get(call.name, call.name)
    if copy.tool_choice.WhichOneof("kind") == "function_name":
        copy.tool_choice.function_name = names.get(copy.tool_choice.function_name, copy.tool_choice.function_name)
    return copy


def restore_names(frame: Frame, own_names: Mapping[str, str]) -> None:
    """Restores the original function names in an answer's calls."""
    for event in frame:
        if event.WhichOneof("event") == "delta":
            for call in event.delta.tool_calls:
                call.name = own_names.get(call.name, call.name)


def refuses_tool_schemas(error: WeftError, body: Json) -> bool:
    """Whether an engine has probably rejected a request because of a function's schema."""
    return (
        bool(body.get("tools"))
        and error.reason is Reason.BACKEND_REJECTED
        and bool(_SCHEMA_WORDS.search(error.message))
    )


def with_plain_schemas(body: Json) -> tuple[Json, list[ParameterWarning]]:
    """Returns a copy of a body with schemas that every engine supports, and warnings about removed keywords."""
    tools: list[Json] = []
    warnings: list[ParameterWarning] = []
    for index, tool in enumerate(body["tools"]):
        function = tool.get("function", {})
        parameters = function.get("parameters", {})
        plain = _plain(parameters)
        if plain == parameters:
            tools.append(tool)
            continue
        others = {key: value for key, value in function.items() if key != "strict"}
        tools.append({**tool, "function": {**others, "parameters": {"type": "object", **plain}}})
        field = f"tools[{index}].function.parameters"
        message = f"{field} was simplified: the engine refused the schemas of the tools"
        warnings.append(ParameterWarning(field=field, message=message))
    return {**body, "tools": tools}, warnings


def _plain(schema: object) -> Json:
    if not isinstance(schema, dict):
        return {}
    kept = {key: value for key, value in schema.items() if key in _KEPT and _is_plain(key, value)}
    for key, value in kept.items():
        if key in MAP_KEYS:
            kept[key] = {name: _plain(inner) for name, inner in value.items()}
        elif key == "items":
            kept[key] = _plain(value)
        elif key == "anyOf":
            kept[key] = [_plain(inner) for inner in value]
    return kept


def _is_plain(key: str, value: object) -> bool:
    match key:
        case "type":
            names = value if isinstance(value, list) else [value]
            return bool(names) and all(name in SCHEMA_TYPES for name in names)
        case "description":
            return isinstance(value, str)
        case "properties" | "items":
            return isinstance(value, dict)
        case _:  # lists: required, enum, anyOf
            return isinstance(value, list) and bool(value)
