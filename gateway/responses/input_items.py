"""Translates input items of a response to messages of a conversation.

An assistant's turn is several items: reasoning, text, function calls. They become one message, as templates and engines
expect it, and each function's output becomes a message of the role `tool`.
"""

from collections.abc import Iterable

from gateway.media import RequestMedia
from gateway.openai.chat_fields import ROLES
from gateway.openai.chat_schema import ImageUrl
from gateway.responses.schema import InputItem, InputPart
from weft.api.common.v1 import chat_pb2
from weft.kernel.errors import invalid_field

_TEXT_TYPES = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
_IMAGE_TYPES = frozenset({"input_image", "image_url"})
MAX_CALL_NAME_CHARS = 256
"""Maximum length of a called function's name."""
PART_TYPES = frozenset({"text", "image_url"})
"""The types of content parts that are allowed in place of items."""

_ITEM_TYPES = "'message', 'function_call', 'function_call_output', 'reasoning' or 'item_reference'"
_PART_TYPES = "'input_text', 'input_image', 'input_audio', 'output_text' or 'refusal'"


class ConversationBuilder:
    """Appends items, in order, to the messages of a payload."""

    def __init__(self, payload: chat_pb2.ChatPayload, media: RequestMedia) -> None:
        self._payload = payload
        self._media = media
        self._turn: chat_pb2.ChatMessage | None = None
        self._calls: set[str] = set()
        self.reasoning_unread = 0
        """Number of encrypted reasoning items, which are left out."""

    def add_text(self, role: str, text: str) -> None:
        """Add a message of plain text."""
        self._message(role).content.add(text=text)

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
        message = self._message("user")
        for index, part in enumerate(item.content or ()):
            assert isinstance(part, InputPart)
            self._fill_part(message, part, f"{field}[{index}]")

    def _add_message(self, item: InputItem, field: str) -> None:
        if item.role is None:
            raise invalid_field(f"{field}.role", "is required")
        if item.content is None:
            raise invalid_field(f"{field}.content", "is required")
        if item.content == [] and item.role != "assistant":
            raise invalid_field(f"{field}.content", "must have at least one part")
        message = self._assistant_message() if item.role == "assistant" else self._message(item.role)
        self._fill_content(message, item.content, f"{field}.content")

    def _add_call(self, item: InputItem, field: str) -> None:
        for name in ("call_id", "name", "arguments"):
            if getattr(item, name) is None or (name == "name" and not item.name):
                raise invalid_field(f"{field}.{name}", "is required")
        if len(item.name or "") > MAX_CALL_NAME_CHARS:
            raise invalid_field(f"{field}.name", f"must have at most {MAX_CALL_NAME_CHARS} characters")
        assert item.call_id is not None
        self._calls.add(item.call_id)
        self._assistant_turn().tool_calls.add(
            id=item.call_id, name=item.name or "", arguments_text=item.arguments or ""
        )

    def _add_output(self, item: InputItem, field: str) -> None:
        if item.call_id is None:
            raise invalid_field(f"{field}.call_id", "is required")
        if item.call_id not in self._calls:
            raise invalid_field(f"{field}.call_id", "answers no function call of the input")
        if item.output is None:
            raise invalid_field(f"{field}.output", "is required")
        message = self._payload.messages.add(role=chat_pb2.ROLE_TOOL, tool_call_id=item.call_id)
        self._turn = None
        self._fill_content(message, item.output, f"{field}.output")
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
        return self._payload.messages.add(role=ROLES[role])

    def _assistant_message(self) -> chat_pb2.ChatMessage:
        """Returns the assistant message to extend: the current turn, unless it has text and no calls."""
        turn = self._turn
        if turn is None or ((turn.content or turn.refusal) and not turn.tool_calls):
            turn = self._new_turn()
        return turn

    def _assistant_turn(self) -> chat_pb2.ChatMessage:
        return self._new_turn() if self._turn is None else self._turn

    def _new_turn(self) -> chat_pb2.ChatMessage:
        self._turn = self._payload.messages.add(role=chat_pb2.ROLE_ASSISTANT)
        return self._turn

    def _fill_content(self, target: chat_pb2.ChatMessage, content: str | list[InputPart], field: str) -> None:
        if isinstance(content, str):
            target.content.add(text=content)
            return
        for index, part in enumerate(content):
            self._fill_part(target, part, f"{field}[{index}]")

    def _fill_part(self, target: chat_pb2.ChatMessage, part: InputPart, field: str) -> None:
        if part.type in _TEXT_TYPES:
            if part.text is None:
                raise invalid_field(f"{field}.text", "is required for a part of this type")
            target.content.add(text=part.text)
        elif part.type in _IMAGE_TYPES:
            target.content.add(image=self._image(part, field))
        elif part.type == "input_audio":
            if part.input_audio is None:
                raise invalid_field(f"{field}.input_audio", "is required for a part of this type")
            audio = part.input_audio
            recording = self._media.encoded_audio(audio.data, audio.format, f"{field}.input_audio.data")
            target.content.add(audio=recording)
        elif part.type == "refusal" and target.role == chat_pb2.ROLE_ASSISTANT:
            target.refusal += part.refusal or ""
        elif part.type == "input_file":
            raise invalid_field(f"{field}.type", "files are not supported; send their text, or their pages as images")
        else:
            raise invalid_field(f"{field}.type", f"must be {_PART_TYPES}")

    def _image(self, part: InputPart, field: str) -> chat_pb2.MediaPart:
        if part.image_url is None:
            if part.file_id is not None:
                raise invalid_field(
                    f"{field}.file_id", "uploaded files are not supported; send the image as a data: URL"
                )
            raise invalid_field(f"{field}.image_url", "is required for a part of this type")
        if isinstance(part.image_url, ImageUrl):
            url, place, detail = part.image_url.url, f"{field}.image_url.url", part.image_url.detail
        else:
            url, place, detail = part.image_url, f"{field}.image_url", part.detail
        return self._media.image(url, place, detail=detail or "")


def reasoning_text(item: InputItem) -> str:
    """Returns the text of a reasoning item: its content if present, otherwise its summary."""
    content = item.content
    if isinstance(content, str):
        return content
    return _joined(content or ()) or _joined(item.summary or ())


def _joined(parts: Iterable[InputPart]) -> str:
    return "\n\n".join(part.text for part in parts if part.text)
