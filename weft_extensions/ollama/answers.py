"""Answers of /api/chat and /api/generate: one JSON object, or a stream of JSON lines.

JSON lines have no comments, so warnings, signals and the receipt are in the last object, and a keepalive is a delta
without text. Calls are sent whole, before the end. Lines are assembled by hand, because this runs once per token.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from enum import Enum

from typing_extensions import override

from gateway.answers.answer_builder import (
    FINISH_REASONS,
    MAX_NOTICES,
    AnswerIdentity,
    CalledTool,
    DocumentAnswer,
    add_call,
    has_counts,
    logprobs_json,
    signal_json,
    warning_json,
)
from gateway.answers.call_arguments import CUTTING, arguments_object, cut_call
from gateway.answers.sse import StreamEncoder, receipt_facts
from gateway.errors import OLLAMA_JSON, Dialect, envelope
from weft.api.common.v1 import event_pb2, receipt_pb2, usage_pb2
from weft.dispatch.extra_fields import OF_FUNCTION
from weft.dispatch.frames import texts_of
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.text.json_lines import encode_json

JSON_LINES = b"application/x-ndjson"
CALL_PREFIX = "call"


class Shape(Enum):
    """Which field of an answer has its text."""

    MESSAGE = "message"
    """`message.content`, for /api/chat."""
    RESPONSE = "response"
    """`response`, for /api/generate."""


def done_reason(finish: int) -> str:
    """Returns Ollama's `done_reason`, which is `stop` for tool calls."""
    return "stop" if finish == event_pb2.FINISH_REASON_TOOL_CALLS else FINISH_REASONS.get(finish, "stop")


def timestamp(seconds: int) -> str:
    """Returns a Unix time as RFC 3339 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def measures(receipt: receipt_pb2.Receipt, usage: usage_pb2.Usage) -> dict[str, object]:
    """Returns the durations in nanoseconds and the token counts that are known."""
    timings = receipt.engine_timings
    found: dict[str, object] = {}
    if receipt.HasField("total_time"):
        found["total_duration"] = receipt.total_time.ToNanoseconds()
    if receipt.HasField("load_wait"):
        found["load_duration"] = receipt.load_wait.ToNanoseconds()
    if timings.HasField("prefill_time"):
        found["prompt_eval_duration"] = timings.prefill_time.ToNanoseconds()
    if timings.HasField("decode_time"):
        found["eval_duration"] = timings.decode_time.ToNanoseconds()
    if has_counts(usage):
        found |= {"prompt_eval_count": usage.prompt_tokens, "eval_count": usage.completion_tokens}
    return found


def receipt_json(receipt: receipt_pb2.Receipt) -> dict[str, object]:
    """Returns the receipt with the names that headers of other APIs have after `X-`, in snake case."""
    values = {name.decode().removeprefix("x-").replace("-", "_"): value for name, value in receipt_facts(receipt)}
    words: dict[bytes, object] = {b"true": True, b"false": False}
    return {
        name: words[value] if value in words else int(value) if value.isdigit() else value.decode()
        for name, value in values.items()
    }


def text_json(shape: Shape, text: str, thinking: str = "", calls: Sequence[object] = ()) -> dict[str, object]:
    """Returns the content of an answer as JSON values."""
    more: dict[str, object] = {"thinking": thinking} if thinking else {}
    if calls:
        more["tool_calls"] = calls
    if shape is Shape.RESPONSE:
        return {"response": text, **more}
    return {"message": {"role": "assistant", "content": text, **more}}


def calls_json(calls: Sequence[CalledTool], finish: int, warnings: list[dict[str, object]]) -> list[dict[str, object]]:
    """Returns the calls as JSON values, with objects as arguments; a truncated call becomes a warning.

    Raises TOOL_CALL_INVALID if the arguments are not a JSON object.
    """
    found: list[dict[str, object]] = []
    for call in calls:
        arguments = arguments_object(call, is_cut=finish in CUTTING)
        if arguments is None:
            warnings.append(cut_call(call))
            continue
        of_function = call.extra.get(OF_FUNCTION) or {}
        function = {**of_function, "index": len(found), "name": call.name, "arguments": arguments}
        found.append({**call.extra, "id": call.id, "function": function})
    return found


class OllamaAnswer(DocumentAnswer):
    """Builds a complete answer."""

    media_type = OLLAMA_JSON

    def __init__(self, identity: AnswerIdentity, shape: Shape) -> None:
        super().__init__(identity, choice_count=1)
        self._shape = shape
        self._text: list[str] = []
        self._thinking: list[str] = []
        self._logprobs: list[event_pb2.TokenLogprob] = []
        self._calls: dict[int, CalledTool] = {}
        self._finish = 0

    def _add_delta(self, delta: event_pb2.Delta) -> None:
        if delta.index:
            return
        self._thinking.append(delta.reasoning)
        self._text += (delta.text, delta.refusal)
        self._logprobs += delta.logprobs
        for piece in delta.tool_calls:
            add_call(self._calls, piece, CALL_PREFIX)
        if delta.finish_reason:
            self._close_choice(0)
            self._finish = delta.finish_reason

    def _forget(self) -> None:
        for kept in (self._text, self._thinking, self._logprobs, self._calls):
            kept.clear()

    def _document(self) -> dict[str, object]:
        receipt = self._receipt or receipt_pb2.Receipt()
        calls = calls_json(list(self._calls.values()), self._finish, self.warnings)
        document = {
            "model": self._model,
            "created_at": timestamp(self._identity.created),
            **text_json(self._shape, "".join(self._text), "".join(self._thinking), calls),
            "done": True,
            "done_reason": done_reason(self._finish),
            **measures(receipt, self.usage),
            "receipt": receipt_json(receipt),
        }
        if self._logprobs:
            document["logprobs"] = logprobs_json(self._logprobs)
        return document


_GOES_ON = b',"done":false}\n'


class OllamaStream(StreamEncoder):
    """Encodes one answer as JSON lines."""

    content_type = JSON_LINES
    reads_joined_texts = True

    def __init__(self, identity: AnswerIdentity, shape: Shape, *, logprobs: bool = False) -> None:
        super().__init__(identity, choice_count=1)
        self._shape = shape
        self._wants_logprobs = logprobs
        # Closes the object that contains the text.
        self._close = b"}" if shape is Shape.MESSAGE else b""
        self._head = self._head_of(identity.model)
        self.keepalive = b'%b""%b%b' % (self._head, self._close, _GOES_ON)
        self._calls: dict[int, CalledTool] = {}
        self._finish = 0
        self._warnings: list[dict[str, object]] = []
        self._signals: list[dict[str, object]] = []

    def _head_of(self, model: str) -> bytes:
        """Returns the bytes of every line before its text."""
        start = b'{"model":%b,"created_at":"%b",' % (encode_json(model), timestamp(self._identity.created).encode())
        if self._shape is Shape.RESPONSE:
            return start + b'"response":'
        return start + b'"message":{"role":"assistant","content":'

    @override
    def failure(self, error: WeftError, request_id: str = "") -> bytes:
        return envelope(error, request_id, Dialect.OLLAMA) + b"\n"

    @override
    def _aside(self, event: event_pb2.InferenceEvent, kind: str | None) -> bytes:
        """Keeps warnings and signals for the last line; JSON lines have no comments."""
        if kind == "warning" and len(self._warnings) < MAX_NOTICES:
            self._warnings.append(warning_json(event.warning))
        elif kind == "signal" and len(self._signals) < MAX_NOTICES:
            self._signals.append(signal_json(event.signal))
        return b""

    @override
    def _begin(self, out: list[bytes]) -> None:
        self._head = self._head_of(self._model)
        super()._begin(out)

    def _encode_delta(self, delta: event_pb2.Delta, out: list[bytes]) -> None:
        if delta.index:
            return
        if delta.reasoning:
            out += (self._head, b'"","thinking":', encode_json(delta.reasoning), self._close, _GOES_ON)
        if delta.piece_lengths:
            for joined in texts_of(delta):
                out += (self._head, encode_json(joined), self._close, _GOES_ON)
            return
        text = delta.text + delta.refusal
        if text or (self._wants_logprobs and delta.logprobs):
            out += (self._head, encode_json(text), self._close)
            if self._wants_logprobs and delta.logprobs:
                out += (b',"logprobs":', encode_json(logprobs_json(delta.logprobs)))
            out.append(_GOES_ON)
        for piece in delta.tool_calls:
            add_call(self._calls, piece, CALL_PREFIX)
        if delta.finish_reason:
            self._finish = delta.finish_reason
            self._close_choice(0)

    def _encode_end(self, receipt: receipt_pb2.Receipt, out: list[bytes]) -> None:
        self._complete(receipt, out)
        calls = calls_json(list(self._calls.values()), self._finish, self._warnings)
        if calls:
            out += (self._head, b'"","tool_calls":', encode_json(calls), self._close, _GOES_ON)
        last: dict[str, object] = {
            "model": self._model,
            "created_at": timestamp(self._identity.created),
            **text_json(self._shape, ""),
            "done": True,
            "done_reason": done_reason(self._finish),
            **measures(receipt, self.usage),
            "receipt": receipt_json(receipt),
        }
        if self._warnings:
            last["warnings"] = self._warnings
        if self._signals:
            last["signals"] = self._signals
        out += (encode_json(last), b"\n")
        self.is_done = True
