"""Events to `chat.completion.chunk` events. Assembled by hand: this runs once per token of every stream."""

from gateway.translate.pieces import AnswerIdentity, chat_logprobs, finish_reason
from gateway.translate.sse import StreamEncoder, encode_json
from weft.api.common.v1 import event_pb2
from weft.kernel.ids import new_id

_END = b"}]}\n\n"
_GOES_ON = b',"logprobs":null,"finish_reason":null' + _END
_PREAMBLE = b'{"role":"assistant","content":""}' + _GOES_ON


class ChatStream(StreamEncoder):
    """One streamed chat answer."""

    def __init__(
        self,
        identity: AnswerIdentity,
        *,
        choice_count: int,
        logprobs: bool,
        include_usage: bool = False,
        include_events: bool = False,
    ) -> None:
        super().__init__(
            identity, choice_count=choice_count, include_usage=include_usage, include_events=include_events
        )
        self._wants_logprobs = logprobs
        self._heads: dict[int, bytes] = {}
        self._named_calls: set[tuple[int, int]] = set()

    def _encode_delta(self, delta: event_pb2.Delta, out: list[bytes]) -> None:
        index = delta.index
        fields = self._fields(delta, index)
        if not (fields or delta.finish_reason):
            return
        head = self._heads.get(index)
        if head is None:
            head = self._heads[index] = self._head(index)
            out += (head, _PREAMBLE)
        if fields:
            out += (head, b"{", fields, b"}", self._tail(delta))
        if delta.finish_reason:
            self._close_choice(index)
            reason = finish_reason(delta.finish_reason).encode()
            out += (head, b'{},"logprobs":null,"finish_reason":"', reason, b'"', _END)

    def _fields(self, delta: event_pb2.Delta, index: int) -> bytes:
        """The members of the chunk's delta object, without braces."""
        text, reasoning, refusal = delta.text, delta.reasoning, delta.refusal
        calls = delta.tool_calls
        if text and not (reasoning or refusal or calls):
            return b'"content":' + encode_json(text)
        fields = []
        if reasoning:
            fields.append(b'"reasoning_content":' + encode_json(reasoning))
        if text:
            fields.append(b'"content":' + encode_json(text))
        if refusal:
            fields.append(b'"refusal":' + encode_json(refusal))
        if calls:
            fields.append(b'"tool_calls":' + encode_json([self._call(call, index) for call in calls]))
        if not fields and self._wants_logprobs and delta.logprobs:
            # A token that is only part of a character has a probability and no text yet.
            return b'"content":""'
        return b",".join(fields)

    def _call(self, call: event_pb2.ToolCallDelta, choice: int) -> dict[str, object]:
        """A piece of a tool call. Clients concatenate what they get, so id, type and name go out once."""
        function: dict[str, object] = {"arguments": call.arguments_text}
        if (choice, call.index) in self._named_calls:
            return {"index": call.index, "function": function}
        self._named_calls.add((choice, call.index))
        function = {"name": call.name, **function}
        return {"index": call.index, "id": call.id or new_id("call"), "type": "function", "function": function}

    def _tail(self, delta: event_pb2.Delta) -> bytes:
        if not (self._wants_logprobs and delta.logprobs):
            return _GOES_ON
        logprobs = encode_json({"content": chat_logprobs(delta.logprobs), "refusal": None})
        return b',"logprobs":' + logprobs + b',"finish_reason":null' + _END

    def _head(self, index: int) -> bytes:
        return self._opening() + b'"choices":[{"index":%d,"delta":' % index

    def _opening(self) -> bytes:
        identity = self._identity
        return b'data: {"id":%b,"object":"chat.completion.chunk","created":%d,"model":%b,"system_fingerprint":null,' % (
            encode_json(identity.answer_id),
            identity.created,
            encode_json(self._model),
        )
