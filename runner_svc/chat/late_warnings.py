"""Warnings that only the end of an answer can give: what the engine left out of the request without a word."""

from collections.abc import Iterator

from runner_svc.chat.answer_receipt import warning
from runner_svc.policy.unkept_requests import dropped_prompt
from weft.api.common.v1 import chat_pb2, usage_pb2, warning_pb2
from weft.dispatch.frames import Frame, GenerationPayload


class LateWarnings:
    """Watches one turn of an answer for what was asked and is not in it."""

    def __init__(self, payload: GenerationPayload) -> None:
        self._payload = payload
        self._words = _words(payload)
        self._must_call = isinstance(payload, chat_pb2.ChatPayload) and _must_call(payload)
        self._has_call = False

    def note(self, frame: Frame) -> None:
        """The next frame of the engine."""
        if self._must_call and not self._has_call:
            self._has_call = any(event.HasField("delta") and event.delta.tool_calls for event in frame)

    def at_end(self, usage: usage_pb2.Usage) -> Iterator[warning_pb2.Warning]:
        """What there is to say once the engine has told its figures."""
        if self._must_call and not self._has_call:
            yield warning_pb2.Warning(
                code=warning_pb2.WARNING_CODE_UNSUPPORTED_PARAMETER,
                field="tool_choice",
                message="demanded a call of a tool, and the engine answered without one",
            )
        if said := dropped_prompt(self._words, usage.prompt_tokens):
            yield warning(warning_pb2.WARNING_CODE_PROMPT_DROPPED, said)


def _must_call(payload: chat_pb2.ChatPayload) -> bool:
    choice = payload.tool_choice
    return bool(payload.tools) and (
        choice.WhichOneof("kind") == "function_name" or choice.mode == chat_pb2.ToolChoice.MODE_REQUIRED
    )


def _words(payload: GenerationPayload) -> int:
    """How many words the prompt has at least: what is said by messages, or the prompts of a completion."""
    if isinstance(payload, chat_pb2.ChatPayload):
        return sum(len(part.text.split()) for message in payload.messages for part in message.content)
    return sum(len(prompt.tokens.ids) or len(prompt.text.split()) for prompt in payload.prompts)
