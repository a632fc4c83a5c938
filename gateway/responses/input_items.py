"""Translates input items of a response to messages of a conversation.

An assistant's turn is several items: reasoning, text, function calls. They become one message, as templates and engines
expect, and the output of each function becomes a message of the role `tool`.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from gateway.openai.chat_builder import ROLES, ChatBuilder
from gateway.openai.chat_schema import arguments_text
from gateway.openai.extension_fields import unsupported
from gateway.openai.readable_text import file_text, text_in
from gateway.responses.compaction_items import KINDS
from gateway.responses.namespaces import CLIENT_SEARCH, SEARCH, Member, flat_name
from gateway.responses.schema import InputItem, InputPart, OtherItem
from gateway.responses.tool_search import SEARCH_OUTPUT, found_names
from gateway.server_tools.request_tools import RequestTools
from weft.api.common.v1 import chat_pb2
from weft.dispatch.extra_fields import carried_only
from weft.dispatch.history import converted, left_out_note
from weft.kernel.errors.error_tree import invalid_field

if TYPE_CHECKING:
    from gateway.responses.search_history import SearchHistory

_PART_MEMBERS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "summary_text": "text",
    "reasoning_text": "text",
    "input_image": "image_url",
    "image_url": "image_url",
    "input_audio": "input_audio",
}
"""The member with the content, by type of content part."""
_ASSISTANT_PART_MEMBERS = _PART_MEMBERS | {"refusal": "refusal"}
MAX_CALL_NAME_CHARS = 256
"""Maximum length of a called function's name."""
PART_TYPES = frozenset({"text", "image_url"})
"""Types of content parts that may replace items."""

_CALL = "_call"
_SEARCH = "web_search_call"
_BY_MODEL = frozenset({
    "reasoning", "mcp_list_tools", "mcp_approval_request", *KINDS,
})  # fmt: skip
"""Kinds of items, besides calls, that models and services write."""
_NOT_SAID = frozenset({"mcp_list_tools", "mcp_approval_request", "mcp_approval_response"})
"""Kinds of items that a model cannot use without the service that wrote them."""
_RESULTS = ("output", "outputs", "results", "error")
_NOT_ARGUMENTS = frozenset({*_RESULTS, "call_id", "name", "namespace", "result", "execution", "server_label"})
_IMAGE_PARTS = frozenset({"input_image", "image_url"})
_MAX_SHOWN_CHARS = 64
_REFERENCE = "item_reference"
_LOST = "[an earlier item is missing: it is not stored]"
_AS_TEXT = "it was sent to the model as text or as a function call"
_UNREAD = "only the service that wrote it can read it, so the model got a note in its place"
_LEFT_OUT = "it was left out"
# Not `encode_json`, which rejects integers beyond 64 bits.
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

_ITEM_TYPES = "'message', 'function_call', 'function_call_output', 'reasoning' or 'item_reference'"
_PART_TYPES = "'input_text', 'input_image', 'input_audio', 'output_text' or 'refusal'"


class ItemReader:
    """Adds items, in order, to the messages of a chat."""

    def __init__(
        self,
        chat: ChatBuilder,
        items: Sequence[InputItem],
        members: Mapping[str, Member] = MappingProxyType({}),
        hosted: RequestTools | None = None,
    ) -> None:
        """`items`: all that will be added, in order; `members`: the functions of namespaces by flat name.

        `hosted`: the tools that the gateway may run.
        """
        chat.expect([_role_of(item, is_last=index == len(items) - 1) for index, item in enumerate(items)])
        self._chat = chat
        self._added = 0
        self._flat_names = {member: flat for flat, member in members.items()}
        self._has_search = CLIENT_SEARCH in self._flat_names
        self._answered = {item.call_id for item in items if _is_output(item.kind) and isinstance(item.call_id, str)}
        """Calls that have a result."""
        self._has_lost = any(item.kind == _REFERENCE for item in items)
        """Whether the input refers to missing items, one of which a result may answer."""
        self._turn: chat_pb2.ChatMessage | None = None
        self._hosted = hosted
        self._searches: SearchHistory | None = None
        """None: there is no search so far."""
        self.reasoning_unread = 0
        """Number of encrypted reasoning items, which are left out."""

    def add(self, item: InputItem, field: str) -> None:
        """Adds the next item. Raises INVALID_ARGUMENT naming `field` or a part of it."""
        self._chat.turn_to(self._added)
        self._added += 1
        if self._searches is not None and not item.kind.endswith(_CALL):
            self.end()
        if isinstance(item, OtherItem):
            self._add_other(item, field)
            return
        match item.kind:
            case "message":
                self._add_message(item, field)
            case "function_call":
                self._add_call(item, field)
            case "function_call_output":
                self._add_output(item, field)
            case "reasoning":
                self._add_reasoning(item)
            case "item_reference":
                self._add_lost(field)
            case "compaction":
                self._message("user").content.add(text=item.text or "")
            case _:
                raise invalid_field(f"{field}.type", f"must be {_ITEM_TYPES}")

    def end(self) -> None:
        """Adds what stands behind the last calls."""
        if self._searches is not None and self._searches.end_turn():
            self._turn = None

    def add_parts(self, item: InputItem, field: str) -> None:
        """Adds a user message with content parts that were given in place of items."""
        self._chat.turn_to(self._added)
        self._chat.add_content(self._message("user"), item.content or (), field, self._add_part)

    def _add_message(self, item: InputItem, field: str) -> None:
        if item.role is None:
            raise invalid_field(f"{field}.role", "is required")
        if item.content is None:
            raise invalid_field(f"{field}.content", "is required")
        if item.content == [] and item.role != "assistant" and not self._chat.is_answered:
            raise invalid_field(f"{field}.content", "must have at least one part")
        message = self._assistant_message() if item.role == "assistant" else self._message(item.role)
        self._chat.add_content(message, item.content, f"{field}.content", self._add_part)

    def _add_call(self, item: InputItem, field: str) -> None:
        for name in ("call_id", "name", "arguments"):
            if getattr(item, name) is None or (name != "arguments" and not getattr(item, name)):
                raise invalid_field(f"{field}.{name}", "is required")
        if len(item.name or "") > MAX_CALL_NAME_CHARS:
            raise invalid_field(f"{field}.name", f"must have at most {MAX_CALL_NAME_CHARS} characters")
        turn = self._new_turn() if self._turn is None else self._turn
        extra = carried_only(item.model_extra)
        name = item.name or ""
        if item.namespace:
            member = Member(item.namespace, name)
            name = self._flat_names.get(member) or flat_name(member)
        self._chat.add_call(turn, item.call_id or "", name, arguments_text(item.arguments), extra)

    def _add_output(self, item: InputItem, field: str) -> None:
        if not item.call_id:
            raise invalid_field(f"{field}.call_id", "is required")
        orphan = self._chat.add_orphan(
            item.call_id, f"{field}.call_id", "does not match a function call in the input", may_be_lost=self._has_lost
        )
        if item.output is None:
            raise invalid_field(f"{field}.output", "is required")
        message = orphan or self._chat.add_result(item.call_id)
        self._turn = None
        self._chat.add_content(message, item.output, f"{field}.output", self._add_part)
        if not message.content:
            message.content.add(text="")

    def _add_reasoning(self, item: InputItem) -> None:
        text = reasoning_text(item)
        if not text:
            self.reasoning_unread += bool(item.encrypted_content)
            return
        turn = self._turn
        if turn is None or turn.content or turn.tool_calls or turn.refusal:
            turn = self._new_turn()
        turn.reasoning += text

    def _add_lost(self, field: str) -> None:
        """Adds a note for a reference to an item that is not stored."""
        problem = "names no stored item"
        if not self._chat.is_earlier:
            raise invalid_field(f"{field}.id", problem)
        self._message("user").content.add(text=_LOST)
        self._chat.warnings.append(converted(f"{field}.id", problem))

    def _add_other(self, item: OtherItem, field: str) -> None:
        """Adds an item of a kind that engines do not support, from the history of another service."""
        kind, call_id = item.kind, item.call_id if isinstance(item.call_id, str) else ""
        if kind == _SEARCH and self._hosted is not None and self._add_search(item):
            return
        if not self._chat.is_earlier:
            raise invalid_field(f"{field}.type", f"must be {_ITEM_TYPES}")
        text = text_in(_members_of(item))
        if kind in KINDS and not text:
            raise invalid_field(f"{field}.encrypted_content", "is required: without it the conversation before is lost")
        is_read = bool(text) or _is_output(kind) or kind.endswith(_CALL)
        how = _LEFT_OUT if kind in _NOT_SAID else _AS_TEXT if is_read else _UNREAD
        if not (self._has_search and kind.startswith(SEARCH)):
            words = f"'{kind[:_MAX_SHOWN_CHARS]}' is not supported: {how}"
            self._chat.warnings.append(unsupported(f"{field}.type", words))
        if kind in _NOT_SAID:
            return
        if _is_output(kind):
            self._add_other_output(item, call_id)
        elif kind.endswith(_CALL):
            self._add_other_call(item, call_id)
        else:
            note = left_out_note(kind[:_MAX_SHOWN_CHARS], "weft does not support it")
            self._message("user").content.add(text=text or note)

    def _add_search(self, item: InputItem) -> bool:
        """Adds a search that a gateway of this mesh ran, as the model read it; False: another service ran it."""
        if self._searches is None:
            from gateway.responses.search_history import SearchHistory  # noqa: PLC0415 - few requests need it

            assert self._hosted is not None
            self._searches = SearchHistory(self._chat, self._hosted)
        turn = self._searches.add(item, self._turn)
        self._turn = self._turn if turn is None else turn
        return turn is not None

    def _add_other_call(self, item: OtherItem, call_id: str) -> None:
        """Adds a call of another kind of tool: a function call if its result follows, otherwise text."""
        name = item.name if isinstance(item.name, str) and item.name else item.kind.removesuffix(_CALL)
        given = item.arguments
        if given is None:
            given = {key: value for key, value in _members_of(item).items() if key not in _NOT_ARGUMENTS}
        arguments = arguments_text(given)
        if call_id and call_id in self._answered:
            turn = self._new_turn() if self._turn is None else self._turn
            self._chat.add_call(turn, call_id, name[:MAX_CALL_NAME_CHARS], arguments)
            return
        results = {key: value for key, value in _members_of(item).items() if key in _RESULTS}
        text = f"[{name[:MAX_CALL_NAME_CHARS]} was called with {arguments}]"
        failed = "[The call failed.]" if item.status == "failed" else ""
        self._assistant_message().content.add(text="\n".join(filter(None, (text, text_in(results), failed))))

    def _add_other_output(self, item: OtherItem, call_id: str) -> None:
        message = self._chat.add_orphan(call_id, "", "") if self._chat.is_answered else None
        if message is None:
            message = self._chat.add_result(call_id) if self._chat.has_call(call_id) else self._message("user")
        self._turn = None
        output = item.output
        for part in output if isinstance(output, list) else ():
            if isinstance(part, dict) and part.get("type") in _IMAGE_PARTS and isinstance(part.get("image_url"), str):
                self._chat.add_image(message, part["image_url"], "input")
        if self._has_search and item.kind == SEARCH_OUTPUT:
            text = found_names(item)
        else:
            members = {key: value for key, value in _members_of(item).items() if key != "call_id"}
            text = text_in(output) or _encode(members)
        message.content.add(text=text)

    def _message(self, role: str) -> chat_pb2.ChatMessage:
        self._turn = None
        return self._chat.add_message(role)

    def _assistant_message(self) -> chat_pb2.ChatMessage:
        """Returns the assistant message to extend: the current turn, unless it has text and no calls."""
        turn = self._turn
        if turn is None or ((turn.content or turn.refusal) and not turn.tool_calls):
            turn = self._new_turn()
        return turn

    def _new_turn(self) -> chat_pb2.ChatMessage:
        self._turn = self._chat.add_message("assistant")
        return self._turn

    def _add_part(self, message: chat_pb2.ChatMessage, part: InputPart, field: str) -> None:
        is_assistant = message.role == chat_pb2.ROLE_ASSISTANT
        members = _ASSISTANT_PART_MEMBERS if is_assistant else _PART_MEMBERS
        if part.type == "input_file":
            what = str((part.model_extra or {}).get("filename") or "file")[:_MAX_SHOWN_CHARS]
            problem = "files are not supported unless they are text; send their text, or their pages as images"
            self._chat.add_readable(message, file_text(part.model_extra or {}), what, f"{field}.type", problem)
            return
        if members.get(part.type) == "image_url" and part.image_url is None and part.file_id is not None:
            problem = "uploaded files are not supported; send the image as a data: URL"
            self._chat.add_readable(message, "", "image", f"{field}.file_id", problem)
            return
        is_empty = is_assistant and part.type == "refusal" and part.refusal is None
        if not is_empty:
            self._chat.add_part(message, part, field, members, _PART_TYPES)


def _members_of(item: InputItem) -> dict[str, Any]:
    """Returns the content of an item, without its id, type and status."""
    return item.model_dump(mode="json", exclude_none=True, exclude={"id", "type", "status"})


def _is_output(kind: str) -> bool:
    return kind.endswith("_output") or kind == "mcp_approval_response"


def _role_of(item: InputItem, *, is_last: bool) -> chat_pb2.Role.ValueType:
    """Returns the role of an item in the conversation; `user` for an unknown kind at the end of the input."""
    kind = item.kind
    if kind == "message":
        return ROLES.get(item.role or "", chat_pb2.ROLE_USER)
    if _is_output(kind):
        return chat_pb2.ROLE_TOOL
    is_known = kind.endswith(_CALL) or kind in _BY_MODEL
    return chat_pb2.ROLE_USER if is_last and not is_known else chat_pb2.ROLE_ASSISTANT


def reasoning_text(item: InputItem) -> str:
    """Returns the text of a reasoning item: its content if present, otherwise its summary."""
    content = item.content
    if isinstance(content, str):
        return content
    return _joined(content or ()) or _joined(item.summary or ())


def _joined(parts: Iterable[InputPart]) -> str:
    return "\n\n".join(part.text for part in parts if part.text)
