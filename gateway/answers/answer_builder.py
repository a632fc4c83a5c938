"""Builders of unary (non-streaming) answers from frames of events, and the fields that all generating APIs share."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from typing_extensions import override

from gateway.errors import JSON
from weft.api.common.v1 import event_pb2, receipt_pb2, signal_pb2, usage_pb2, warning_pb2
from weft.dispatch.extra_fields import join_fields
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.text.json_lines import encode_json
from weft.kernel.text.json_objects import plain_object
from weft.kernel.time.clock import Clock
from weft.kernel.values.fast_dataclass import fast_dataclass
from weft.kernel.values.names import new_id

FINISH_REASONS: dict[int, str] = {
    event_pb2.FINISH_REASON_STOP: "stop",
    event_pb2.FINISH_REASON_LENGTH: "length",
    event_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
    event_pb2.FINISH_REASON_CONTENT_FILTER: "content_filter",
}
FUNCTION_CALL = "function_call"
"""The finish reason for a tool call in answers to the older `functions`."""
ONE_CALL_ONLY = "the model made more than one call, which 'functions' cannot hold; use 'tools'"
# OpenAI's value for minus infinity, which JSON lacks.
_LOWEST_LOGPROB = -9999.0


@fast_dataclass(kw_only=True)
class AnswerIdentity:
    """Fields that an answer shares with each of its chunks."""

    answer_id: str
    created: int
    """Unix time, seconds."""
    model: str
    """The requested name; replaced by the name of the answering model once that is known."""


def new_identity(clock: Clock, prefix: str, model: str) -> AnswerIdentity:
    """Returns the identity of a new answer, with an id that begins with `prefix`."""
    return AnswerIdentity(answer_id=new_id(prefix), created=int(clock.utc_now().timestamp()), model=model)


def finish_reason(value: int) -> str:
    """Returns OpenAI's finish reason; `stop` for a value that this version does not know."""
    return FINISH_REASONS.get(value, "stop")


def text_finish_reason(value: int) -> str:
    """Returns the finish reason of a text completion, which has no tools."""
    return "stop" if value == event_pb2.FINISH_REASON_TOOL_CALLS else finish_reason(value)


def called_function(call_id: str, function: dict[str, object], extra: dict[str, Any]) -> dict[str, object]:
    """Returns a call in the format of chats, with the fields that weft does not know."""
    more = {name: value for name, value in extra.items() if name != "function"}
    of_function = extra.get("function")
    return {
        **more,
        "id": call_id,
        "type": "function",
        "function": {**(of_function if isinstance(of_function, dict) else {}), **function},
    }


def has_counts(usage: usage_pb2.Usage) -> bool:
    """Whether token counts are known."""
    return bool(usage.prompt_tokens or usage.completion_tokens)


def usage_json(usage: usage_pb2.Usage) -> dict[str, object]:
    """Returns token counts as JSON values; the details are always present."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_prompt_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def logprobs_json(
    logprobs: Iterable[event_pb2.TokenLogprob], unknown_bytes: list[int] | None = None
) -> list[dict[str, object]]:
    """Returns log probabilities of tokens; `top_logprobs` is always present, but may be empty."""

    def token(entry: event_pb2.TokenLogprob | event_pb2.TopLogprob) -> dict[str, object]:
        raw = list(entry.raw_bytes) if entry.HasField("raw_bytes") else unknown_bytes
        return {"token": entry.token, "logprob": finite_logprob(entry.logprob), "bytes": raw}

    return [{**token(entry), "top_logprobs": [token(top) for top in entry.top]} for entry in logprobs]


def finite_logprob(logprob: float) -> float:
    """Returns a log probability that JSON can represent: -9999 for minus infinity."""
    return logprob if math.isfinite(logprob) else _LOWEST_LOGPROB


def unfinished_answer() -> WeftError:
    """The error of an answer that ended before a choice had a finish reason."""
    return WeftError(Reason.BACKEND_PROTOCOL_ERROR, "the answer ended without a finish reason")


NOTICES = frozenset({"signal", "warning", "tool_call", "tool_result"})
"""Kinds of events that are notices, by their field names in InferenceEvent."""
MAX_NOTICES = 64
"""Maximum number of signals, and of warnings, in a unary answer; as in a receipt."""

_CODE_PREFIX = "WARNING_CODE_"


def notice_json(event: event_pb2.InferenceEvent, kind: str) -> dict[str, object]:
    """Returns a notice as JSON values."""
    if kind == "signal":
        return signal_json(event.signal)
    if kind == "warning":
        return warning_json(event.warning)
    if kind == "tool_call":
        call = event.tool_call
        return {"id": call.id, "name": call.name, "arguments": plain_object(call.arguments)}
    result = event.tool_result
    return {"id": result.id, "failed": result.failed, "content": result.content}


def notice_text(event: event_pb2.InferenceEvent, kind: str) -> str:
    """Returns a notice in one line: its kind and its name."""
    if kind == "signal":
        return f"signal {event.signal.name}"
    if kind == "warning":
        warning = event.warning
        field = f" field={warning.field}" if warning.field else ""
        return f"warning {_code(warning)}{field} {warning.message}"
    if kind == "tool_call":
        return f"tool {event.tool_call.name}"
    return "tool failed" if event.tool_result.failed else "tool done"


def signal_json(signal: signal_pb2.Signal) -> dict[str, object]:
    """Returns a signal as JSON values."""
    return {"name": signal.name, "arguments": plain_object(signal.arguments)}


def warning_json(warning: warning_pb2.Warning) -> dict[str, object]:
    """Returns a warning as JSON values; `field` is null if it concerns no field."""
    return {"code": _code(warning), "field": warning.field or None, "message": warning.message}


def _code(warning: warning_pb2.Warning) -> str:
    """Returns the warning's published code; "unspecified" for one that this version does not know."""
    known = warning.code in warning_pb2.WarningCode.values()
    name = warning_pb2.WarningCode.Name(warning.code) if known else f"{_CODE_PREFIX}UNSPECIFIED"
    return name.removeprefix(_CODE_PREFIX).lower()


@dataclass(slots=True)
class CalledTool:
    """A call in an answer; its arguments arrive in pieces."""

    id: str
    name: str
    pieces: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    """Fields of the call that weft does not know; those of its function are under `function`."""

    @property
    def arguments(self) -> str:
        """The arguments so far."""
        return "".join(self.pieces)


def add_call(calls: dict[int, CalledTool], delta: event_pb2.ToolCallDelta, id_prefix: str) -> CalledTool | None:
    """Adds a delta to its call in `calls`, which are in order of arrival. Returns the call if it is new."""
    call = calls.get(delta.index)
    is_new = call is None
    if call is None:
        call = calls[delta.index] = CalledTool(delta.id or new_id(id_prefix), delta.name)
    call.pieces.append(delta.arguments_text)
    if delta.HasField("extra_fields"):
        join_fields(call.extra, plain_object(delta.extra_fields))
    return call if is_new else None


class AnswerState:
    """The state of an answer, unary or streamed: the answering model, open choices, token counts."""

    def __init__(self, identity: AnswerIdentity, *, choice_count: int) -> None:
        self._identity = identity
        self._model = identity.model
        self._choice_count = choice_count
        self._open_choices = set(range(choice_count))
        self.usage = usage_pb2.Usage()
        """Token counts; zero until the engine reports them."""

    def _close_choice(self, index: int) -> None:
        self._open_choices.discard(index)

    def _end(self, receipt: receipt_pb2.Receipt) -> None:
        """Ends the answer, and takes token counts that the engine did not report from the receipt.

        Raises BACKEND_PROTOCOL_ERROR if a choice has not ended.
        """
        if self._open_choices:
            raise unfinished_answer()
        if not has_counts(self.usage):
            self.usage = receipt.usage


class AnswerBuilder(AnswerState, ABC):
    """Builds a unary answer: call `add` with each frame in order, then `body`."""

    media_type: ClassVar[bytes] = JSON

    def __init__(self, identity: AnswerIdentity, *, choice_count: int) -> None:
        super().__init__(identity, choice_count=choice_count)
        self._receipt: receipt_pb2.Receipt | None = None
        """None until the answer is complete."""
        self._signals: list[dict[str, object]] = []
        self.warnings: list[dict[str, object]] = []
        """Warnings for the caller, as JSON values."""

    def add(self, frame: list[event_pb2.InferenceEvent]) -> None:
        """Adds a frame; ignores events of waiting, progress and mesh tools."""
        for event in frame:
            kind = event.WhichOneof("event")
            if kind == "delta":
                self._add_delta(event.delta)
            elif kind == "usage":
                self.usage = event.usage
            elif kind == "started":
                self._begin_again(event.started.model or self._model)
            elif kind == "signal" and len(self._signals) < MAX_NOTICES:
                self._signals.append(signal_json(event.signal))
            elif kind == "warning" and len(self.warnings) < MAX_NOTICES:
                self.warnings.append(warning_json(event.warning))
            elif kind == "finished":
                self._receipt = event.finished.receipt

    @abstractmethod
    def body(self) -> bytes:
        """Returns the answer as JSON. Raises BACKEND_PROTOCOL_ERROR if it or one of its choices has not ended."""

    def _begin_again(self, model: str) -> None:
        self._model = model
        self._open_choices = set(range(self._choice_count))
        self._signals.clear()
        self.warnings.clear()
        self._forget()

    def _ended(self) -> receipt_pb2.Receipt:
        """Ends the answer; returns its receipt. Raises BACKEND_PROTOCOL_ERROR if it or a choice has not ended."""
        if self._receipt is None:
            raise unfinished_answer()
        self._end(self._receipt)
        return self._receipt

    @abstractmethod
    def _add_delta(self, delta: event_pb2.Delta) -> None:
        """Adds a delta of a choice."""

    @abstractmethod
    def _forget(self) -> None:
        """Resets the builder for another attempt. Earlier attempts had no content."""


def with_warnings(body: bytes, warnings: Sequence[warning_pb2.Warning]) -> bytes:
    """Returns a JSON object with the warnings as its last member; unchanged without any."""
    if not warnings:
        return body
    return body.removesuffix(b"}") + b',"warnings":' + encode_json([warning_json(each) for each in warnings]) + b"}"


class DocumentAnswer(AnswerBuilder):
    """Builds a JSON document with signals and warnings."""

    @override
    def body(self) -> bytes:
        self._ended()
        document = self._document()
        if self.warnings:
            document["warnings"] = self.warnings
        if self._signals:
            document["signals"] = self._signals
        return encode_json(document)

    @abstractmethod
    def _document(self) -> dict[str, object]:
        """Returns the answer as JSON values."""
