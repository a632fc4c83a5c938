"""Events to one `chat.completion`: what a caller gets who did not ask for a stream."""

from dataclasses import dataclass, field
from typing import Any

from gateway.answers.answer_builder import DocumentAnswer
from gateway.answers.chunks import (
    FUNCTION_CALL,
    ONE_CALL_ONLY,
    AnswerIdentity,
    chat_logprobs,
    finish_reason,
    usage_json,
)
from gateway.answers.warnings import warning_json
from weft.api.common.v1 import event_pb2, warning_pb2
from weft.kernel.names import new_id


@dataclass(slots=True)
class _Call:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Choice:
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    refusal: list[str] = field(default_factory=list)
    calls: dict[int, _Call] = field(default_factory=dict)
    logprobs: list[dict[str, object]] = field(default_factory=list)
    finish_reason: str = ""


class ChatAnswer(DocumentAnswer):
    """One chat answer, growing."""

    def __init__(self, identity: AnswerIdentity, *, choice_count: int, logprobs: bool, functions: bool = False) -> None:
        """`functions`: calls are told in the older form, `function_call`."""
        super().__init__(identity, choice_count=choice_count)
        self._wants_logprobs = logprobs
        self._functions = functions
        self._choices: dict[int, _Choice] = {}

    def _add_delta(self, delta: event_pb2.Delta) -> None:
        choice = self._choices.get(delta.index)
        if choice is None:
            choice = self._choices[delta.index] = _Choice()
        choice.text.append(delta.text)
        choice.reasoning.append(delta.reasoning)
        choice.refusal.append(delta.refusal)
        for call in delta.tool_calls:
            _add_call(choice, call)
        if self._wants_logprobs and delta.logprobs:
            choice.logprobs += chat_logprobs(delta.logprobs)
        if delta.finish_reason:
            self._close_choice(delta.index)
            choice.finish_reason = finish_reason(delta.finish_reason)

    def _forget(self) -> None:
        self._choices.clear()

    def _document(self) -> dict[str, object]:
        return {
            "id": self._identity.answer_id,
            "object": "chat.completion",
            "created": self._identity.created,
            "model": self._model,
            "system_fingerprint": None,
            "service_tier": None,
            "choices": [self._choice(index, choice) for index, choice in sorted(self._choices.items())],
            "usage": usage_json(self.usage),
        }

    def _choice(self, index: int, choice: _Choice) -> dict[str, object]:
        message, reason = _message(choice), choice.finish_reason
        if self._functions:
            self._make_older(message)
            reason = FUNCTION_CALL if reason == "tool_calls" else reason
        logprobs = {"content": choice.logprobs, "refusal": None} if self._wants_logprobs else None
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": reason,
        }

    def _make_older(self, message: dict[str, Any]) -> None:
        calls = message.pop("tool_calls", [])
        if calls:
            message["function_call"] = calls[0]["function"]
        if len(calls) > 1:
            code = warning_pb2.WARNING_CODE_TOOL_CALL_NOT_RUN
            self.warnings.append(warning_json(warning_pb2.Warning(code=code, message=ONE_CALL_ONLY)))


def _add_call(choice: _Choice, piece: event_pb2.ToolCallDelta) -> None:
    call = choice.calls.get(piece.index)
    if call is None:
        call = choice.calls[piece.index] = _Call(piece.id or new_id("call"), piece.name)
    call.arguments.append(piece.arguments_text)


def _message(choice: _Choice) -> dict[str, Any]:
    text, reasoning, refusal = "".join(choice.text), "".join(choice.reasoning), "".join(choice.refusal)
    says_otherwise = bool(choice.calls or refusal)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if says_otherwise and not text else text,
        "refusal": refusal or None,
        "annotations": [],
    }
    if reasoning:
        message["reasoning_content"] = reasoning
    if choice.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": "".join(call.arguments)},
            }
            for call in choice.calls.values()
        ]
    return message
