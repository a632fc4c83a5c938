"""Output items of a response, built from deltas; a sink receives each step. Also ids of responses and items."""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec

from gateway.answers.answer_builder import logprobs_json
from gateway.openai.chat_schema import MAX_TOOL_CALL_ID_CHARS
from gateway.responses.namespaces import CLIENT_SEARCH, Member
from weft.api.common.v1 import event_pb2
from weft.dispatch.extra_fields import join_fields
from weft.durable.responses import RESPONSE_PREFIX
from weft.durable.tasks import TASK_PREFIX
from weft.kernel.text.json_objects import plain_object

_HEX_CHARS = 24
_ITEM = re.compile(rf"[a-z]{{2,8}}_([0-9a-f]{{{_HEX_CHARS}}})_i?[0-9]{{1,6}}")
_BACKGROUND = re.compile(rf"{RESPONSE_PREFIX}([0-9a-f]{{{_HEX_CHARS}}})")
_CONVERSATION = re.compile(rf"conv_[0-9a-f]{{{_HEX_CHARS}}}")
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "web_search_call": "ws",
    "file_search_call": "fs",
    "code_interpreter_call": "ci",
    "image_generation_call": "ig",
    "mcp_list_tools": "mcpl",
    "compaction": "cmp",
    "tool_search_call": "tsc",
}


def new_response_id() -> str:
    """Returns an unguessable id: 96 random bits."""
    return RESPONSE_PREFIX + secrets.token_hex(_HEX_CHARS // 2)


def is_conversation(record_id: str) -> bool:
    """Whether an id of a stored record is that of a conversation, and not of a response."""
    return _CONVERSATION.fullmatch(record_id) is not None


def task_of(response_id: str) -> str | None:
    """Returns the task of a background response; None: the id is of another form."""
    found = _BACKGROUND.fullmatch(response_id)
    return None if found is None else f"{TASK_PREFIX}-{found.group(1)}"


def call_id(response_id: str, index: int) -> str:
    """Returns an id for a function call without one; `index` is its position among the output items."""
    return f"call_{response_id.removeprefix(RESPONSE_PREFIX)}_{index}"


def output_item_id(response_id: str, kind: str, index: int) -> str:
    """Returns the id of an output item; `kind` is its type, `index` its position."""
    return f"{_PREFIXES.get(kind, 'item')}_{response_id.removeprefix(RESPONSE_PREFIX)}_{index}"


def input_item_id(response_id: str, kind: str, index: int) -> str:
    """Returns an id for an input item without one."""
    return f"{_PREFIXES.get(kind, 'item')}_{response_id.removeprefix(RESPONSE_PREFIX)}_i{index}"


def response_of(item_id: str) -> str | None:
    """Returns the response id of an item; None: a foreign item."""
    found = _ITEM.fullmatch(item_id)
    return None if found is None else RESPONSE_PREFIX + found.group(1)


TOOL_SEARCH = "tool_search_call"
OUTPUT_TEXT = "output_text"
REFUSAL = "refusal"
REASONING_TEXT = "reasoning_text"
_HOMES = {OUTPUT_TEXT: "message", REFUSAL: "message", REASONING_TEXT: "reasoning"}
_INCOMPLETE: dict[int, str] = {
    event_pb2.FINISH_REASON_LENGTH: "max_output_tokens",
    event_pb2.FINISH_REASON_CONTENT_FILTER: "content_filter",
}

Logprobs = list[dict[str, object]]


@dataclass(slots=True)
class Part:
    """A content part of an item: text, a refusal, or reasoning."""

    kind: str
    index: int
    pieces: list[str] = field(default_factory=list)
    logprobs: Logprobs = field(default_factory=list)
    head: bytes = b""
    """First bytes of each of its events, for the sink."""
    annotations: list[dict[str, object]] = field(default_factory=list)
    """Citations in the text."""

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.pieces)

    def json(self, *, empty: bool = False) -> dict[str, object]:
        """Returns JSON values; `empty`: without content, as at its beginning."""
        text = "" if empty else self.text
        if self.kind == OUTPUT_TEXT:
            logprobs = [] if empty else self.logprobs
            annotations = [] if empty else self.annotations
            return {"type": OUTPUT_TEXT, "annotations": annotations, "logprobs": logprobs, "text": text}
        return {"type": self.kind, "refusal" if self.kind == REFUSAL else "text": text}


@dataclass(slots=True)
class Item:
    """An output item. A function call has arguments, the others have parts."""

    kind: str
    """message, reasoning, function_call, or the call of a server's tool"""
    id: str
    index: int
    parts: list[Part] = field(default_factory=list)
    call_id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)
    namespace: str = ""
    """The namespace of the called function; empty: none."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Fields of the call that weft does not know; all fields of a server's tool."""
    status: str = "in_progress"
    head: bytes = b""
    """As `Part.head`, for a function call."""

    @property
    def is_text(self) -> bool:
        """Whether it is a message with one text and no refusal."""
        return self.kind == "message" and [part.kind for part in self.parts] == [OUTPUT_TEXT]

    def text_json(self, status: str) -> dict[str, object]:
        """Returns its only text as JSON values, without the message around it."""
        (part,) = self.parts
        logprobs = {"logprobs": part.logprobs} if part.logprobs else {}
        return {"type": OUTPUT_TEXT, "id": self.id, "status": status, "text": part.text, **logprobs}

    def json(self, *, empty: bool = False, status: str = "") -> dict[str, object]:
        """Returns JSON values; `empty`: without content, as at its beginning; `status` replaces its own."""
        shown_status = status or self.status
        if self.kind == "function_call":
            return {
                **self.extra,
                "type": self.kind,
                "id": self.id,
                "call_id": self.call_id,
                "name": self.name,
                **({"namespace": self.namespace} if self.namespace else {}),
                "arguments": "" if empty else "".join(self.arguments),
                "status": shown_status,
            }
        if self.kind == TOOL_SEARCH:
            given = b"" if empty else "".join(self.arguments).encode()
            return {
                "type": self.kind,
                "id": self.id,
                "call_id": self.call_id,
                "execution": "client",
                "arguments": _object(given),
                "status": shown_status,
            }
        if self.kind not in {"message", "reasoning"}:
            state = {} if self.kind == "compaction" else {"status": shown_status}
            return {"type": self.kind, "id": self.id, **self.extra, **state}
        parts = [] if empty else [part.json() for part in self.parts]
        if self.kind == "reasoning":
            return {
                "type": self.kind,
                "id": self.id,
                "summary": [],
                "content": parts,
                "encrypted_content": None,
                "status": shown_status,
            }
        return {"type": self.kind, "id": self.id, "role": "assistant", "status": shown_status, "content": parts}


def _object(text: bytes) -> dict[str, Any]:
    """Returns a JSON object; empty if the text is incomplete or something else."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return {}


class OutputSink:
    """Receives each step of building output items, in order; ignores them by default."""

    def item_added(self, item: Item) -> None:
        """An item began."""

    def part_added(self, item: Item, part: Part) -> None:
        """A content part began."""

    def text_added(self, item: Item, part: Part, text: str, logprobs: Logprobs) -> None:
        """A content part grew."""

    def arguments_added(self, item: Item, text: str) -> None:
        """A function call's arguments grew."""

    def annotated(self, item: Item, part: Part) -> None:
        """A complete text got one more annotation, its last."""

    def part_done(self, item: Item, part: Part) -> None:
        """A content part is complete."""

    def item_done(self, item: Item) -> None:
        """An item is complete."""


class OutputItems:
    """The items of one response.

    Consecutive deltas of the same kind form one item. Function calls may interleave, so they stay open until the end.
    """

    def __init__(
        self, response_id: str, *, logprobs: bool, members: Mapping[str, Member] = MappingProxyType({})
    ) -> None:
        """`members`: the functions of namespaces by the names that the model knows."""
        self._members = members
        self.sink = OutputSink()
        self.first: tuple[str, dict[str, Any]] | None = None
        """Type and fields of an item before the model's: a summary, or a server's tool call that failed; None: none."""
        self._response_id = response_id
        self._wants_logprobs = logprobs
        self.begin_again()

    def begin_again(self) -> None:
        """Discards all output for another attempt."""
        self.items: list[Item] = []
        self._open: Item | None = None
        self._latest: Item | None = None
        self._calls: dict[int, Item] = {}
        self._call_ids: set[str] = set()
        self._loose: Logprobs = []
        """Log probabilities of tokens that are only part of a character."""
        self.finish_reason = 0
        """A FinishReason; 0: none yet."""

    def add(self, delta: event_pb2.Delta) -> None:
        """Adds a delta."""
        if self.first is not None and not self.items:
            kind, fields = self.first
            self._end(self._begin_item(kind, fields=fields), "completed" if kind == "compaction" else "failed")
        logprobs = logprobs_json(delta.logprobs, unknown_bytes=[]) if self._wants_logprobs and delta.logprobs else None
        if delta.reasoning:
            self._add_text(REASONING_TEXT, delta.reasoning, [])
            logprobs = logprobs if delta.text else None
        if delta.text:
            if self._loose or logprobs:
                logprobs, self._loose = self._loose + (logprobs or []), []
            self._add_text(OUTPUT_TEXT, delta.text, logprobs or [])
        elif logprobs:
            self._loose += logprobs
        if delta.refusal:
            self._add_text(REFUSAL, delta.refusal, [])
        for call in delta.tool_calls:
            self._add_call(call)
        if delta.finish_reason:
            self.finish_reason = delta.finish_reason

    def incomplete_reason(self) -> str | None:
        """Returns why the finished answer is incomplete; None: complete."""
        return _INCOMPLETE.get(self.finish_reason)

    def close(self) -> None:
        """Completes all open items; an answer without items gets an empty message."""
        is_text = self._open is not None and self._open.parts[-1].kind == OUTPUT_TEXT
        if not self.items or (is_text and self._loose):
            self._add_text(OUTPUT_TEXT, "", self._loose)
        # If the answer was cut off, the item that grew last is incomplete.
        cut = self._latest if self.incomplete_reason() else None
        if self._open is not None:
            self._end_open("incomplete" if self._open is cut else "completed")
        for call in self._calls.values():
            self._end(call, "incomplete" if call is cut else "completed")
        self._calls.clear()

    def json(self, open_status: str, *, flat: bool = False) -> list[dict[str, object]]:
        """Returns all items as JSON values, open ones with `open_status`; `flat`: texts without a message around."""
        statuses = [open_status if item.status == "in_progress" else item.status for item in self.items]
        return [
            item.text_json(status) if flat and item.is_text else item.json(status=status)
            for item, status in zip(self.items, statuses, strict=True)
        ]

    def text(self) -> str:
        """Returns the text of the answer, without reasoning and refusals."""
        return "".join(part.text for item in self.items for part in item.parts if part.kind == OUTPUT_TEXT)

    def _add_text(self, kind: str, text: str, logprobs: Logprobs) -> None:
        item = self._open
        part = item.parts[-1] if item is not None and item.parts else None
        if item is None or part is None or part.kind != kind:
            item, part = self._begin_part(kind)
        self._latest = item
        part.pieces.append(text)
        if logprobs:
            part.logprobs += logprobs
        if text or logprobs:
            self.sink.text_added(item, part, text, logprobs)

    def _begin_part(self, kind: str) -> tuple[Item, Part]:
        home, item = _HOMES[kind], self._open
        if item is not None and item.kind == home:
            self.sink.part_done(item, item.parts[-1])
        else:
            if item is not None:
                self._end_open("completed")
            item = self._open = self._begin_item(home)
        part = Part(kind, len(item.parts))
        item.parts.append(part)
        self.sink.part_added(item, part)
        return item, part

    def _begin_item(
        self, kind: str, call: event_pb2.ToolCallDelta | None = None, fields: dict[str, Any] | None = None
    ) -> Item:
        index = len(self.items)
        item = Item(kind, output_item_id(self._response_id, kind, index), index, extra=fields or {})
        if call is not None:
            item.call_id = self._fresh_call_id(call.id)
            item.namespace, item.name = self._members.get(call.name, ("", call.name))
            item.extra = plain_object(call.extra_fields)
        self.items.append(item)
        self.sink.item_added(item)
        return item

    def _add_call(self, call: event_pb2.ToolCallDelta) -> None:
        item = self._calls.get(call.index)
        if item is None:
            if self._open is not None:
                self._end_open("completed")
            is_search = self._members.get(call.name) == CLIENT_SEARCH
            item = self._begin_item(TOOL_SEARCH if is_search else "function_call", call)
            self._calls[call.index] = item
        elif call.HasField("extra_fields"):
            join_fields(item.extra, plain_object(call.extra_fields))
        self._latest = item
        if call.arguments_text:
            item.arguments.append(call.arguments_text)
            self.sink.arguments_added(item, call.arguments_text)

    def _fresh_call_id(self, given: str) -> str:
        """Returns a unique call id. Engines may number calls per answer, but clients identify calls by id."""
        is_usable = 0 < len(given) <= MAX_TOOL_CALL_ID_CHARS and given not in self._call_ids
        # Not random: repeated rendering must give the same answer.
        fresh = given if is_usable else call_id(self._response_id, len(self.items))
        self._call_ids.add(fresh)
        return fresh

    def _end_open(self, status: str) -> None:
        item, self._open = self._open, None
        assert item is not None
        self.sink.part_done(item, item.parts[-1])
        self._end(item, status)

    def _end(self, item: Item, status: str) -> None:
        item.status = status
        self.sink.item_done(item)
