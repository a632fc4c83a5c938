"""Converts the event stream of Anthropic's Messages API to chunks.

Order, end, usage and frames are checked by `runner_svc.openai_upstream.openai_stream`.
"""

from collections.abc import Collection
from typing import Any

import msgspec
from typing_extensions import override

from runner_svc.openai_upstream.chunks import (
    Chunk,
    ChunkChoice,
    ChunkDelta,
    ChunkFunction,
    ChunkToolCall,
    ChunkUsage,
    Index,
    PromptDetails,
)
from runner_svc.openai_upstream.dialects import count_of
from runner_svc.openai_upstream.errors import JSON_FAULTS, ErrorBody, malformed
from runner_svc.openai_upstream.openai_stream import DONE, StreamReader
from runner_svc.openai_upstream.sse import ErrorPayload
from weft.api.common.v1 import event_pb2
from weft.dispatch.frames import Frame
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

MAX_BLOCKS = 1_024
"""Maximum number of content blocks in an answer."""
_BUSY = frozenset({"overloaded_error", "rate_limit_error"})
_END = b'"message_stop"'


class _Block(msgspec.Struct):
    type: str = ""
    id: str | None = None
    name: str | None = None
    text: str | None = None
    thinking: str | None = None
    data: str | None = None
    """Thinking encrypted by the provider."""
    input: Any = None


class _Delta(msgspec.Struct):
    type: str = ""
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    partial_json: str | None = None
    stop_reason: str | None = None
    stop_sequence: object = None


class _Usage(msgspec.Struct):
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class _Message(msgspec.Struct):
    role: str = "assistant"
    usage: object = None


class _Event(msgspec.Struct):
    type: str
    index: Index = 0
    message: _Message | None = None
    content_block: _Block | None = None
    delta: _Delta | None = None
    usage: object = None
    error: ErrorBody | None = None


_DECODER = msgspec.json.Decoder(_Event)


class MessagesReader(StreamReader):
    """Reads one stream of the Messages API."""

    def __init__(self, *, whole: bool, used_ids: Collection[str] = ()) -> None:
        """See `StreamReader`."""
        super().__init__(1, 1, whole=whole, used_ids=used_ids)
        self._usage = _Usage()
        self._call_numbers: dict[int, int] = {}
        """Tool call numbers by the position of their block."""
        self._unfilled: set[int] = set()
        """Positions of calls without arguments so far."""
        self._seals: Frame = []
        """Signed or encrypted thinking in the current event."""

    @override
    def read(self, payloads: list[bytes]) -> list[Frame]:
        return super().read([DONE if _is_end(payload) else payload for payload in payloads])

    @override
    def _events(self, chunk: Chunk) -> Frame:
        seals, self._seals = self._seals, []
        events = super()._events(chunk) + seals
        self.took_token = self.took_token or bool(seals)
        return events

    @override
    def _decode(self, payload: bytes) -> Chunk:
        try:
            event = _DECODER.decode(payload)
        except JSON_FAULTS as error:
            if isinstance(payload, ErrorPayload):
                raise self._stated(payload, "an error without a message") from error
            raise malformed("the provider sent an event that is not one of the Messages API:", error) from error
        if event.type == "error" or isinstance(payload, ErrorPayload):
            error_type = event.error.type if event.error is not None else ""
            if error_type in _BUSY and not self._content_started:
                raise WeftError(Reason.BACKEND_NOT_READY, f"the provider is busy ({error_type})")
            raise self._stated(payload, "an error without a message")
        match event.type:
            case "message_start":
                return self._begun(event)
            case "content_block_start":
                return self._block_begun(event.index, event.content_block or _Block())
            case "content_block_delta":
                return self._continued(event.index, event.delta or _Delta())
            case "content_block_stop" if event.index in self._unfilled:
                self._unfilled.discard(event.index)
                return self._arguments(event.index, "{}")
            case "message_delta":
                return self._ended(event)
            case _:
                # Pings, ends of blocks, and event types newer than this version.
                return Chunk()

    def _begun(self, event: _Event) -> Chunk:
        message = event.message or _Message()
        self._note(message.usage)
        return Chunk(choices=[ChunkChoice(delta=ChunkDelta(role=message.role))])

    def _seal(self, delta: event_pb2.Delta) -> Chunk:
        self._seals.append(event_pb2.InferenceEvent(delta=delta))
        return Chunk()

    def _block_begun(self, index: int, block: _Block) -> Chunk:
        if block.type == "redacted_thinking" and block.data:
            return self._seal(event_pb2.Delta(redacted_reasoning=block.data))
        if block.type != "tool_use":
            return _content(ChunkDelta(content=block.text or None, reasoning_content=block.thinking or None))
        if len(self._call_numbers) >= MAX_BLOCKS:
            raise WeftError(
                Reason.BACKEND_PROTOCOL_ERROR, f"the provider sent over {MAX_BLOCKS:,} tool calls in one answer"
            )
        number = self._call_numbers[index] = len(self._call_numbers)
        written = msgspec.json.encode(block.input).decode() if block.input else ""
        if not written:
            self._unfilled.add(index)
        function = ChunkFunction(name=block.name, arguments=written)
        return _content(ChunkDelta(tool_calls=[ChunkToolCall(index=number, id=block.id, function=function)]))

    def _continued(self, index: int, delta: _Delta) -> Chunk:
        match delta.type:
            case "text_delta":
                return _content(ChunkDelta(content=delta.text))
            case "thinking_delta":
                return _content(ChunkDelta(reasoning_content=delta.thinking))
            case "input_json_delta":
                if delta.partial_json:
                    self._unfilled.discard(index)
                return self._arguments(index, delta.partial_json or "")
            case "signature_delta" if delta.signature:
                return self._seal(event_pb2.Delta(reasoning_signature=delta.signature))
            case _:
                # Citations, and types newer than this version.
                return Chunk()

    def _arguments(self, index: int, text: str) -> Chunk:
        number = self._call_numbers.get(index)
        if number is None:
            raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "the provider sent arguments without a tool call")
        if not text:
            return Chunk()
        return _content(ChunkDelta(tool_calls=[ChunkToolCall(index=number, function=ChunkFunction(arguments=text))]))

    def _ended(self, event: _Event) -> Chunk:
        self._note(event.usage)
        word = event.delta.stop_reason if event.delta is not None else None
        stop_sequence = event.delta.stop_sequence if event.delta is not None else None
        choice = ChunkChoice(delta=ChunkDelta(), finish_reason=word, stop_reason=stop_sequence)
        usage = self._usage
        cached, written = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
        return Chunk(
            choices=[choice],
            usage=ChunkUsage(
                # The API counts cached tokens, read or written, separately.
                prompt_tokens=usage.input_tokens + cached + written,
                completion_tokens=usage.output_tokens,
                prompt_tokens_details=PromptDetails(cached_tokens=cached, cache_write_tokens=written),
            ),
        )

    def _note(self, usage: object) -> None:
        """Keeps the latest readable figure of each kind."""
        if not isinstance(usage, dict):
            return
        for name in _Usage.__struct_fields__:
            if (found := count_of(usage.get(name))) is not None:
                setattr(self._usage, name, found)


def _content(delta: ChunkDelta) -> Chunk:
    return Chunk(choices=[ChunkChoice(delta=delta)])


def _is_end(payload: bytes) -> bool:
    if _END not in payload:
        return False
    try:
        return _DECODER.decode(payload).type == "message_stop"
    except JSON_FAULTS:
        return False
