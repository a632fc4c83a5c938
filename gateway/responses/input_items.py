"""Translates input items of a response to messages of a conversation.

An assistant's turn is several items: reasoning, text, function calls. They become one message, as templates and engines
expect it, and each function's output becomes a message of the role `tool`.
"""

from collections.abc import Iterable

from gateway.openai.chat_builder import ChatBuilder
from gateway.responses.schema import InputItem, InputPart
from weft.api.common.v1 import chat_pb2
from weft.kernel.errors import invalid_field

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
"""By type of a content part: the member that has its content."""
_ASSISTANT_PART_MEMBERS = _PART_MEMBERS | {"refusal": "refusal"}
MAX_CALL_NAME_CHARS = 256
"""Maximum length of a called function's name."""
PART_TYPES = frozenset({"text", "image_url"})
"""The types of content parts that are allowed in place of items."""

_ITEM_TYPES = "'message', 'function_call', 'function_call_output', 'reasoning' or 'item_reference'"
_PART_TYPES = "'input_text', 'input_image', 'input_audio', 'output_text' or 'refusal'"


class ItemReader:
    """Adds items, in order, to the messages of a chat."""

    def __init__(self, chat: ChatBuilder) -> None:
        self._chat = chat
        self._turn: chat_pb2.ChatMessage | None = None
        self.reasoning_unread = 0
        """Number of encrypted reasoning items, which are left out."""

    def add(self, item: InputItem, field: str) -> None:
        """Add one item. Raises INVALID_ARGUMENT naming `field` or a part of it."""
        match item.kind:
            case "message":
                self._add_message(item, field)
            case "function_call":
                self._add_call(item, field)
            case "function_call_output":
                self._add_output(item, field)
            case "reasoning":
                self._add_reasoning(item)
            case _:
                raise invalid_field(f"{field}.type", f"must be {_ITEM_TYPES}")

    def add_parts(self, item: InputItem, field: str) -> None:
        """Add a user message whose content parts were given in place of items."""
        self._chat.add_content(self._message("user"), item.content or (), field, self._add_part)

    def _add_message(self, item: InputItem, field: str) -> None:
        if item.role is None:
            raise invalid_field(f"{field}.role", "is required")
        if item.content is None:
            raise invalid_field(f"{field}.content", "is required")
        if item.content == [] and item.role != "assistant":
            raise invalid_field(f"{field}.content", "must have at least one part")
        message = self._assistant_message() if item.role == "assistant" else self._message(item.role)
        self._chat.add_content(message, item.content, f"{field}.content", self._add_part)

    def _add_call(self, item: InputItem, field: str) -> None:
        for name in ("call_id", "name", "arguments"):
            if getattr(item, name) is None or (name == "name" and not item.name):
                raise invalid_field(f"{field}.{name}", "is required")
        if len(item.name or "") > MAX_CALL_NAME_CHARS:
            raise invalid_field(f"{field}.name", f"must have at most {MAX_CALL_NAME_CHARS} characters")
        turn = self._new_turn() if self._turn is None else self._turn
        self._chat.add_call(turn, item.call_id or "", item.name or "", item.arguments or "")

    def _add_output(self, item: InputItem, field: str) -> None:
        if item.call_id is None:
            raise invalid_field(f"{field}.call_id", "is required")
        self._chat.require_called(item.call_id, f"{field}.call_id", "answers no function call of the input")
        if item.output is None:
            raise invalid_field(f"{field}.output", "is required")
        message = self._chat.add_result(item.call_id)
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
            raise invalid_field(f"{field}.type", "files are not supported; send their text, or their pages as images")
        if members.get(part.type) == "image_url" and part.image_url is None and part.file_id is not None:
            raise invalid_field(f"{field}.file_id", "uploaded files are not supported; send the image as a data: URL")
        is_empty = is_assistant and part.type == "refusal" and part.refusal is None
        if not is_empty:
            self._chat.add_part(message, part, field, members, _PART_TYPES)


def reasoning_text(item: InputItem) -> str:
    """Returns the text of a reasoning item: its content if present, otherwise its summary."""
    content = item.content
    if isinstance(content, str):
        return content
    return _joined(content or ()) or _joined(item.summary or ())


def _joined(parts: Iterable[InputPart]) -> str:
    return "\n\n".join(part.text for part in parts if part.text)
