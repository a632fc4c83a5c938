"""Translates the conversation of a Messages request to chat messages; tool results become messages of their own."""

import json

from gateway.anthropic.schema import (
    Base64Source,
    ContentBlock,
    ImageBlock,
    MessageParam,
    RedactedThinkingBlock,
    ResultBlock,
    Source,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    UrlSource,
)
from gateway.media import RequestMedia
from weft.api.common.v1 import chat_pb2
from weft.kernel.errors import WeftError, invalid_field

TOOL_FAILED = "The tool failed: "
"""Prefix of a tool result with `is_error`: engines have no such field."""

_ROLES: dict[str, chat_pb2.Role.ValueType] = {
    "user": chat_pb2.ROLE_USER,
    "assistant": chat_pb2.ROLE_ASSISTANT,
    "system": chat_pb2.ROLE_SYSTEM,
}

# Not the encoder of answers, which refuses whole numbers beyond 64 bits.
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class Turns:
    """Adds messages to one payload. Successive turns of one role are joined, as in Anthropic's API."""

    def __init__(self, payload: chat_pb2.ChatPayload, media: RequestMedia) -> None:
        self._payload = payload
        self._media = media
        self._calls: set[str] = set()
        self.unreadable: list[str] = []
        """Fields of encrypted blocks of other services, which are left out."""

    def add_system(self, system: str | list[TextBlock]) -> None:
        """Add the system prompt; an empty one is ignored."""
        texts = [system] if isinstance(system, str) else [block.text for block in system]
        for text in texts:
            if text:
                self._turn(chat_pb2.ROLE_SYSTEM).content.add(text=text)

    def add(self, message: MessageParam, field: str) -> None:
        """Add one message. Raises INVALID_ARGUMENT naming a misplaced block."""
        content = message.content
        if isinstance(content, str):
            self._turn(_ROLES[message.role]).content.add(text=content)
            return
        if not content and message.role != "assistant":
            raise invalid_field(f"{field}.content", "must have at least one block")
        if message.role == "assistant":
            # A turn that says nothing is still a turn.
            self._turn(chat_pb2.ROLE_ASSISTANT)
        for index, block in enumerate(content):
            self._add_block(message.role, block, f"{field}.content[{index}]")

    def _add_block(self, role: str, block: ContentBlock, field: str) -> None:
        if isinstance(block, TextBlock):
            self._turn(_ROLES[role]).content.add(text=block.text)
        elif role == "user" and isinstance(block, ImageBlock):
            self._turn(chat_pb2.ROLE_USER).content.add(image=self._image(block.source, f"{field}.source"))
        elif role == "user" and isinstance(block, ToolResultBlock):
            self._add_result(block, field)
        elif role == "assistant" and isinstance(block, ToolUseBlock):
            self._add_call(block)
        elif role == "assistant" and isinstance(block, ThinkingBlock):
            turn = self._turn(chat_pb2.ROLE_ASSISTANT)
            turn.reasoning += block.thinking
        elif role == "assistant" and isinstance(block, RedactedThinkingBlock):
            self.unreadable.append(field)
        else:
            raise _misplaced(role, block.type, field)

    def _turn(self, role: chat_pb2.Role.ValueType) -> chat_pb2.ChatMessage:
        messages = self._payload.messages
        if messages and messages[-1].role == role:
            return messages[-1]
        return messages.add(role=role)

    def _add_call(self, block: ToolUseBlock) -> None:
        self._calls.add(block.id)
        turn = self._turn(chat_pb2.ROLE_ASSISTANT)
        turn.tool_calls.add(id=block.id, name=block.name, arguments_text=_encode(block.input))

    def _add_result(self, block: ToolResultBlock, field: str) -> None:
        if block.tool_use_id not in self._calls:
            raise invalid_field(f"{field}.tool_use_id", "answers no tool_use of an earlier assistant message")
        turn = self._payload.messages.add(role=chat_pb2.ROLE_TOOL, tool_call_id=block.tool_use_id)
        content = block.content or ""
        if isinstance(content, str):
            turn.content.add(text=content)
        else:
            for index, part in enumerate(content):
                self._add_result_part(turn, part, f"{field}.content[{index}]")
        if block.is_error:
            _mark_failed(turn)

    def _add_result_part(self, turn: chat_pb2.ChatMessage, part: ResultBlock, field: str) -> None:
        if isinstance(part, TextBlock):
            turn.content.add(text=part.text)
        elif isinstance(part, ImageBlock):
            turn.content.add(image=self._image(part.source, f"{field}.source"))
        elif isinstance(part, ToolReferenceBlock):
            turn.content.add(text=f"The tool {part.tool_name} is available.")
        else:
            raise invalid_field(f"{field}.type", f"'{part.type[:64]}' is not supported here: send text or images")

    def _image(self, source: Source, field: str) -> chat_pb2.MediaPart:
        if isinstance(source, Base64Source):
            return self._media.encoded_image(source.data, source.media_type, f"{field}.data")
        if isinstance(source, UrlSource):
            return self._media.image(source.url, f"{field}.url")
        raise invalid_field(f"{field}.type", "must be 'base64' or 'url': no files are kept here")


def _mark_failed(turn: chat_pb2.ChatMessage) -> None:
    first = turn.content[0] if turn.content else turn.content.add(text="")
    if first.WhichOneof("kind") == "text":
        first.text = TOOL_FAILED + first.text
    else:
        rest = list(turn.content)
        del turn.content[:]
        turn.content.add(text=TOOL_FAILED)
        turn.content.extend(rest)


def _misplaced(role: str, kind: str, field: str) -> WeftError:
    if kind == "document":
        return invalid_field(f"{field}.type", "documents are not supported: send their text in a text block")
    return invalid_field(f"{field}.type", f"'{kind[:64]}' is not supported in a message of role '{role}'")
