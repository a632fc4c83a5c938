"""Chat answers: one `chat.completion`, or streamed chunks."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from gateway.answers.answer_builder import (
    FUNCTION_CALL,
    ONE_CALL_ONLY,
    AnswerIdentity,
    CalledTool,
    add_call,
    called_function,
    finish_reason,
    logprobs_json,
    warning_json,
)
from gateway.openai.choices import ChoicesAnswer, ChunkStream, stop_member, stop_reason
from weft.api.common.v1 import event_pb2, warning_pb2
from weft.dispatch.extra_fields import join_fields
from weft.dispatch.frames import texts_of
from weft.kernel.text.json_lines import encode_each, encode_json
from weft.kernel.text.json_objects import plain_object
from weft.kernel.values.names import new_id


@dataclass(slots=True)
class _Choice:
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    refusal: list[str] = field(default_factory=list)
    calls: dict[int, CalledTool] = field(default_factory=dict)
    logprobs: list[dict[str, object]] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    """Fields of the message that weft does not know."""
    finish_reason: str = ""
    stop_sequence: str = ""


class ChatAnswer(ChoicesAnswer[_Choice]):
    """Builds a chat completion."""

    _object = "chat.completion"
    _constant: ClassVar[dict[str, object]] = {"system_fingerprint": None, "service_tier": None}

    def __init__(self, identity: AnswerIdentity, *, choice_count: int, logprobs: bool, functions: bool = False) -> None:
        """`functions`: whether calls are written in the older form, `function_call`."""
        super().__init__(identity, choice_count=choice_count, logprobs=logprobs)
        self._functions = functions

    def _add_delta(self, delta: event_pb2.Delta) -> None:
        choice = self._choices.get(delta.index)
        if choice is None:
            choice = self._choices[delta.index] = _Choice()
        choice.text.append(delta.text)
        if delta.reasoning:
            choice.reasoning.append(delta.reasoning)
        if delta.refusal:
            choice.refusal.append(delta.refusal)
        for call in delta.tool_calls:
            add_call(choice.calls, call, "call")
        if self._wants_logprobs and delta.logprobs:
            choice.logprobs += logprobs_json(delta.logprobs)
        if delta.finish_reason:
            self._close_choice(delta.index)
            choice.finish_reason = finish_reason(delta.finish_reason)
            choice.stop_sequence = delta.stop_sequence
        if delta.HasField("extra_fields"):
            join_fields(choice.extra, plain_object(delta.extra_fields))

    def _choice_json(self, index: int, choice: _Choice) -> dict[str, object]:
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
            **stop_reason(choice.stop_sequence),
        }

    def _make_older(self, message: dict[str, Any]) -> None:
        calls = message.pop("tool_calls", [])
        if calls:
            message["function_call"] = calls[0]["function"]
        if len(calls) > 1:
            code = warning_pb2.WARNING_CODE_TOOL_CALL_NOT_RUN
            self.warnings.append(warning_json(warning_pb2.Warning(code=code, message=ONE_CALL_ONLY)))


def _message(choice: _Choice) -> dict[str, Any]:
    text, reasoning, refusal = "".join(choice.text), "".join(choice.reasoning), "".join(choice.refusal)
    says_otherwise = bool(choice.calls or refusal)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if says_otherwise and not text else text,
        "refusal": refusal or None,
        "annotations": [],
    }
    message |= {name: value for name, value in choice.extra.items() if not message.get(name)}
    if reasoning:
        message["reasoning_content"] = reasoning
    if choice.calls:
        message["tool_calls"] = [
            called_function(call.id, {"name": call.name, "arguments": call.arguments}, call.extra)
            for call in choice.calls.values()
        ]
    return message


_END = b"}]}\n\n"
_GOES_ON = b',"logprobs":null,"finish_reason":null' + _END
_TEXT_GOES_ON = b"}" + _GOES_ON
_CALL_LEFT_OUT = b": warning tool_call_not_run " + ONE_CALL_ONLY.encode() + b"\n\n"
_PREAMBLE = b'{"role":"assistant","content":""}' + _GOES_ON


class ChatStream(ChunkStream):
    """Encodes one streamed chat completion."""

    _object = b"chat.completion.chunk"
    _constant = b'"system_fingerprint":null,"service_tier":null,'
    _content = b'"delta"'
    reads_joined_texts = True

    def __init__(
        self,
        identity: AnswerIdentity,
        *,
        choice_count: int,
        logprobs: bool,
        include_usage: bool = False,
        include_events: bool = False,
        functions: bool = False,
    ) -> None:
        """`functions`: whether calls are written in the older form, `function_call`."""
        super().__init__(
            identity,
            choice_count=choice_count,
            logprobs=logprobs,
            include_usage=include_usage,
            include_events=include_events,
        )
        self._functions = functions
        self._text_heads: dict[int, bytes] = {}
        """First bytes of a chunk of text, by choice that has begun; empty if log probabilities are wanted."""
        self._places: dict[int, dict[int, int]] = {}
        """Position of each call, by choice. Clients use the index as a position in a list that they append to, so calls
        are numbered in order of arrival, not by the model server's indexes."""

    def _encode_delta(self, delta: event_pb2.Delta, out: list[bytes]) -> None:
        index, text = delta.index, delta.text
        head = self._text_heads.get(index)
        if delta.piece_lengths:
            self._encode_texts(head, delta, out)
            return
        # Nearly every delta has only text.
        is_more = delta.finish_reason or delta.reasoning or delta.refusal or delta.tool_calls
        if head and text and not (is_more or delta.HasField("extra_fields")):
            out += (head, encode_json(text), _TEXT_GOES_ON)
            return
        fields = self._fields(delta, index)
        if self._functions and any(self._places[index][call.index] for call in delta.tool_calls):
            out.append(_CALL_LEFT_OUT)
        if not (fields or delta.finish_reason):
            return
        head = self._heads.get(index)
        if head is None:
            head = self._introduce(index, out)
        if fields:
            out += (head, b"{", fields, b"}", self._tail(delta))
        if delta.finish_reason:
            self._close_choice(index)
            reason = finish_reason(delta.finish_reason)
            if self._functions and reason == "tool_calls":
                reason = FUNCTION_CALL
            out += (head, b'{},"logprobs":null,"finish_reason":"', reason.encode(), b'"', stop_member(delta), _END)

    def _encode_texts(self, head: bytes | None, delta: event_pb2.Delta, out: list[bytes]) -> None:
        """Appends the chunks of a delta that joins texts."""
        texts = texts_of(delta)
        if head:
            out += (head, encode_each(texts)[:-1].replace(b"\n", _TEXT_GOES_ON + head), _TEXT_GOES_ON)
            return
        for text in texts:
            self._encode_delta(event_pb2.Delta(index=delta.index, text=text), out)

    def _introduce(self, index: int, out: list[bytes]) -> bytes:
        """Begins a choice and those before it, as clients keep choices in order of arrival; returns its first bytes."""
        for known in range(len(self._heads), index + 1):
            head = self._new_head(known)
            out += (head, _PREAMBLE)
            if not self._wants_logprobs:
                self._text_heads[known] = head + b'{"content":'
        return self._heads[index]

    def _fields(self, delta: event_pb2.Delta, index: int) -> bytes:
        """Returns the members of the chunk's delta object, without braces."""
        text, reasoning, refusal = delta.text, delta.reasoning, delta.refusal
        calls = delta.tool_calls
        extra = plain_object(delta.extra_fields) if delta.HasField("extra_fields") else {}
        if text and not (reasoning or refusal or calls or extra):
            return b'"content":' + encode_json(text)
        fields = [encode_json(name) + b":" + encode_json(value) for name, value in extra.items()]
        if reasoning:
            fields.append(b'"reasoning_content":' + encode_json(reasoning))
        if text:
            fields.append(b'"content":' + encode_json(text))
        if refusal:
            fields.append(b'"refusal":' + encode_json(refusal))
        if calls and self._functions:
            fields += self._function_call(calls, index)
        elif calls:
            fields.append(b'"tool_calls":' + encode_json([self._call(call, index) for call in calls]))
        if not fields and self._wants_logprobs and delta.logprobs:
            # A token that is part of a character has a log probability, but no text.
            return b'"content":""'
        return b",".join(fields)

    def _call(self, call: event_pb2.ToolCallDelta, choice: int) -> dict[str, object]:
        """Returns a delta of a tool call. Clients concatenate deltas, so id, type and name are sent only once."""
        function: dict[str, object] = {"arguments": call.arguments_text}
        place, is_new = self._place(call, choice)
        extra = plain_object(call.extra_fields) if call.HasField("extra_fields") else {}
        if not is_new:
            return {**extra, "index": place, "function": function}
        function = {"name": call.name, **function}
        return {"index": place, **called_function(call.id or new_id("call"), function, extra)}

    def _place(self, call: event_pb2.ToolCallDelta, choice: int) -> tuple[int, bool]:
        """Returns the index of a call in its choice, and whether it begins with this delta."""
        places = self._places.setdefault(choice, {})
        is_new = call.index not in places
        return places.setdefault(call.index, len(places)), is_new

    def _function_call(self, calls: Iterable[event_pb2.ToolCallDelta], choice: int) -> list[bytes]:
        """Returns the deltas of the only call of the older form, as one member."""
        function: dict[str, str] = {}
        for call in calls:
            place, is_new = self._place(call, choice)
            if place == 0:
                if is_new:
                    function["name"] = call.name
                function["arguments"] = function.get("arguments", "") + call.arguments_text
        return [b'"function_call":' + encode_json(function)] if function else []

    def _tail(self, delta: event_pb2.Delta) -> bytes:
        if not (self._wants_logprobs and delta.logprobs):
            return _GOES_ON
        logprobs = encode_json({"content": logprobs_json(delta.logprobs), "refusal": None})
        return b',"logprobs":' + logprobs + b',"finish_reason":null' + _END
