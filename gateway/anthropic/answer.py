"""Unary answers of the Messages API: events to one `message`."""

from dataclasses import dataclass, field

import msgspec
from pydantic_core import from_json

from gateway.answers.answer_builder import DocumentAnswer
from gateway.answers.answer_fields import AnswerIdentity
from weft.api.common.v1 import event_pb2, usage_pb2
from weft.kernel.errors import WeftError
from weft.kernel.names import new_id
from weft.kernel.reasons import Reason

_STOP_REASONS: dict[int, str] = {
    event_pb2.FINISH_REASON_LENGTH: "max_tokens",
    event_pb2.FINISH_REASON_CONTENT_FILTER: "refusal",
}
# Ends at which a call of a tool may be half written, through no fault of the model's.
CUTTING = frozenset({event_pb2.FINISH_REASON_LENGTH, event_pb2.FINISH_REASON_CONTENT_FILTER})


def stop_reason(finish: int, *, has_calls: bool, has_refusal: bool) -> str:
    """Returns Anthropic's stop reason.

    Engines do not say whether a stop string or the model itself ended it: both are `end_turn`.
    """
    cut = _STOP_REASONS.get(finish)
    if cut is not None:
        return cut
    if has_calls:
        return "tool_use"
    return "refusal" if has_refusal else "end_turn"


def message_usage(usage: usage_pb2.Usage) -> dict[str, object]:
    """Returns token counts; Anthropic counts cached prompt tokens separately."""
    cached = usage.cached_prompt_tokens
    counts: dict[str, object] = {
        "input_tokens": max(usage.prompt_tokens - cached, 0),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    }
    if usage.reasoning_tokens:
        counts["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return counts


def is_whole_object(text: str) -> bool:
    """Whether `text` is a JSON object from its first to its last character."""
    return _is_object_so_far(text) and _parses(text, partial=False)


def is_object_so_far(text: str) -> bool:
    """Whether `text` can be the beginning of a JSON object, as the clients' parsers accept it."""
    return not text.strip() or (_is_object_so_far(text) and _parses(text, partial=True))


def bad_arguments() -> WeftError:
    """Returns the error of a call whose arguments are not a JSON object."""
    return WeftError(Reason.TOOL_CALL_INVALID, "the model called a tool with arguments that are not a JSON object")


def _is_object_so_far(text: str) -> bool:
    return text.lstrip()[:1] == "{"


def _parses(text: str, *, partial: bool) -> bool:
    try:
        from_json(text, allow_inf_nan=False, allow_partial=partial)
    except ValueError:
        return False
    return True


CALL_CUT = "tool_call_cut"
"""Code of the warning about a tool call that the end of the answer truncated."""


@dataclass(slots=True)
class _Block:
    """A block of text or thinking."""

    kind: str
    pieces: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Call:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


class MessagesAnswer(DocumentAnswer):
    """Builds one message."""

    def __init__(self, identity: AnswerIdentity) -> None:
        super().__init__(identity, choice_count=1)
        self._blocks: list[_Block | _Call] = []
        self._calls: dict[int, _Call] = {}
        self._has_refusal = False
        self._finish = 0

    def _add_delta(self, delta: event_pb2.Delta) -> None:
        if delta.index:
            return
        self._add_text("thinking", delta.reasoning)
        self._add_text("text", delta.text)
        self._add_text("text", delta.refusal)
        self._has_refusal = self._has_refusal or bool(delta.refusal)
        for piece in delta.tool_calls:
            self._add_call(piece)
        if delta.finish_reason:
            self._close_choice(0)
            self._finish = delta.finish_reason

    def _add_text(self, kind: str, text: str) -> None:
        if not text:
            return
        last = self._blocks[-1] if self._blocks else None
        if not isinstance(last, _Block) or last.kind != kind:
            last = _Block(kind)
            self._blocks.append(last)
        last.pieces.append(text)

    def _add_call(self, piece: event_pb2.ToolCallDelta) -> None:
        call = self._calls.get(piece.index)
        if call is None:
            call = self._calls[piece.index] = _Call(piece.id or new_id("toolu"), piece.name)
            self._blocks.append(call)
        call.arguments.append(piece.arguments_text)

    def _forget(self) -> None:
        self._blocks.clear()
        self._calls.clear()
        self._has_refusal = False

    def _document(self) -> dict[str, object]:
        content = [told for told in map(self._told, self._blocks) if told is not None]
        return {
            "id": self._identity.answer_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": stop_reason(self._finish, has_calls=bool(self._calls), has_refusal=self._has_refusal),
            "stop_sequence": None,
            "usage": message_usage(self.usage),
        }

    def _told(self, block: _Block | _Call) -> dict[str, object] | None:
        if isinstance(block, _Call):
            return self._call_block(block)
        text = "".join(block.pieces)
        if block.kind == "text":
            return {"type": "text", "text": text}
        return {"type": "thinking", "thinking": text, "signature": ""}

    def _call_block(self, call: _Call) -> dict[str, object] | None:
        """Returns the call as a block; None, and a warning, for a truncated one."""
        arguments = "".join(call.arguments)
        if not arguments.strip():
            # The model gave none.
            arguments = "{}"
        if is_whole_object(arguments):
            # As the model wrote them: a number may be longer than the encoder's.
            return {"type": "tool_use", "id": call.id, "name": call.name, "input": msgspec.Raw(arguments.encode())}
        if self._finish not in CUTTING:
            raise bad_arguments()
        told = f"the answer ended within a call of {call.name[:64]}, which was left out"
        self.warnings.append({"code": CALL_CUT, "field": None, "message": told})
        return None
