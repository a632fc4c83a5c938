"""Translates the messages of a chat request, validating each turn against those before it."""

from gateway.answers.sse import encode_json
from gateway.media import RequestMedia
from gateway.openai.chat_schema import ContentPart, ImageUrl, InputAudio, Message, ToolCallMade
from weft.api.common.v1 import chat_pb2
from weft.kernel.errors import invalid_field


def to_image(image: ImageUrl, field: str, media: RequestMedia) -> chat_pb2.MediaPart:
    """Returns an image; for an address, a part that `gateway.media.supply` fills. Errors name `field`.url."""
    detail = image.detail or ""
    return media.image(image.url, f"{field}.url", detail="high" if detail == "original" else detail)


def to_audio(audio: InputAudio, field: str, media: RequestMedia) -> chat_pb2.MediaPart:
    """Returns a recording. Errors name `field`.data."""
    return media.encoded_audio(audio.data, audio.format, f"{field}.data")


_ROLES: dict[str, chat_pb2.Role.ValueType] = {
    "system": chat_pb2.ROLE_SYSTEM,
    "developer": chat_pb2.ROLE_DEVELOPER,
    "user": chat_pb2.ROLE_USER,
    "assistant": chat_pb2.ROLE_ASSISTANT,
    "tool": chat_pb2.ROLE_TOOL,
    "function": chat_pb2.ROLE_TOOL,
}


class Conversation:
    """Adds messages to a payload, in order. Raises INVALID_ARGUMENT naming the wrong field."""

    def __init__(self, payload: chat_pb2.ChatPayload, media: RequestMedia) -> None:
        self._payload = payload
        self._media = media
        self._calls: set[str] = set()
        # The older form has no ids: a result is that of the last call of its function.
        self._last_calls: dict[str, str] = {}

    def add(self, message: Message, field: str) -> None:
        """Add a turn; `field` is its path in the request."""
        self._require_fit(message, field)
        target = self._payload.messages.add(role=_ROLES[message.role])
        content = message.content
        if isinstance(content, str):
            target.content.add(text=content)
        elif content is not None:
            for index, part in enumerate(content):
                self._add_part(target, part, f"{field}.content[{index}]")
        if message.role == "tool" and message.tool_call_id is not None:
            target.tool_call_id = message.tool_call_id
        if message.role == "function":
            target.tool_call_id = self._call_of(message, field)
        elif message.name is not None:
            target.name = message.name
        if message.role == "assistant":
            self._add_assistant(target, message, field)

    def _require_fit(self, message: Message, field: str) -> None:
        if message.role == "tool":
            if message.tool_call_id is None:
                raise invalid_field(f"{field}.tool_call_id", "is required for role 'tool'")
            if message.tool_call_id not in self._calls:
                raise invalid_field(f"{field}.tool_call_id", "answers no tool call of an earlier assistant message")
        if message.role != "assistant":
            for name, given in (("tool_calls", message.tool_calls), ("function_call", message.function_call)):
                if given:
                    raise invalid_field(f"{field}.{name}", "is only allowed for role 'assistant'")
        if message.content is None and not _may_lack_content(message):
            raise invalid_field(f"{field}.content", "is required")
        if message.content == [] and message.role != "assistant":
            raise invalid_field(f"{field}.content", "must have at least one part")

    def _call_of(self, message: Message, field: str) -> str:
        call = self._last_calls.get(message.name or "")
        if call is None:
            raise invalid_field(f"{field}.name", "names no function that an earlier assistant message called")
        return call

    def _add_assistant(self, target: chat_pb2.ChatMessage, message: Message, field: str) -> None:
        reasoning = message.reasoning_content or message.reasoning
        if reasoning:
            target.reasoning = reasoning
        if message.refusal:
            target.refusal = message.refusal
        for index, call in enumerate(message.tool_calls or ()):
            target.tool_calls.append(_call_record(call, f"{field}.tool_calls[{index}]"))
            self._calls.add(call.id)
        if message.function_call is not None:
            made = message.function_call
            call_id = f"call_{len(self._payload.messages)}"
            target.tool_calls.add(id=call_id, name=made.name, arguments_text=made.arguments)
            self._last_calls[made.name] = call_id

    def _add_part(self, target: chat_pb2.ChatMessage, part: ContentPart, field: str) -> None:
        if part.type == "text" and part.text is not None:
            target.content.add(text=part.text)
        elif part.type == "refusal" and part.refusal is not None:
            target.refusal += part.refusal
        elif part.type == "image_url" and part.image_url is not None:
            target.content.add(image=to_image(part.image_url, f"{field}.image_url", self._media))
        elif part.type == "input_audio" and part.input_audio is not None:
            target.content.add(audio=to_audio(part.input_audio, f"{field}.input_audio", self._media))
        elif part.type in {"text", "refusal", "image_url", "input_audio"}:
            raise invalid_field(f"{field}.{part.type}", "is required for a part of this type")
        else:
            raise invalid_field(f"{field}.type", "must be 'text', 'image_url', 'input_audio' or 'refusal'")


def _may_lack_content(message: Message) -> bool:
    if message.role == "function":
        # The older form writes null for a function that returns nothing.
        return True
    says_otherwise = (
        message.tool_calls,
        message.function_call,
        message.refusal,
        message.reasoning_content,
        message.reasoning,
    )
    return message.role == "assistant" and any(says_otherwise)


def _call_record(call: ToolCallMade, field: str) -> chat_pb2.ToolCallRecord:
    if call.type == "custom":
        if call.custom is None:
            raise invalid_field(f"{field}.custom", "is required for a call of type 'custom'")
        # Templates of models read arguments as JSON.
        arguments = encode_json({"input": call.custom.input}).decode()
        return chat_pb2.ToolCallRecord(id=call.id, name=call.custom.name, arguments_text=arguments)
    if call.function is None:
        raise invalid_field(f"{field}.function", "is required for a call of type 'function'")
    return chat_pb2.ToolCallRecord(id=call.id, name=call.function.name, arguments_text=call.function.arguments)
