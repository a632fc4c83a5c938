"""What whole and streamed answers of the Messages API share: why an answer ended, its usage, and calls of tools."""

from pydantic_core import from_json

from weft.api.common.v1 import event_pb2, usage_pb2
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

_STOP_REASONS: dict[int, str] = {
    event_pb2.FINISH_REASON_LENGTH: "max_tokens",
    event_pb2.FINISH_REASON_CONTENT_FILTER: "refusal",
}
# Ends at which a call of a tool may be half written, through no fault of the model's.
CUTTING = frozenset({event_pb2.FINISH_REASON_LENGTH, event_pb2.FINISH_REASON_CONTENT_FILTER})


def stop_reason(finish: int, *, has_calls: bool, has_refusal: bool) -> str:
    """Anthropic's word for the end of an answer.

    Engines do not say whether a stop string or the model itself ended it: both are `end_turn`.
    """
    cut = _STOP_REASONS.get(finish)
    if cut is not None:
        return cut
    if has_calls:
        return "tool_use"
    return "refusal" if has_refusal else "end_turn"


def message_usage(usage: usage_pb2.Usage) -> dict[str, object]:
    """Token counts. Anthropic counts the tokens of a prompt that came from a cache apart from the others."""
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
    """Whether `text` can be the beginning of a JSON object: what the clients' own parsers take as such."""
    return not text.strip() or (_is_object_so_far(text) and _parses(text, partial=True))


def bad_arguments() -> WeftError:
    """The error of a call whose arguments cannot be an `input`, which is an object and never text."""
    return WeftError(Reason.TOOL_CALL_INVALID, "the model called a tool with arguments that are not a JSON object")


def _is_object_so_far(text: str) -> bool:
    return text.lstrip()[:1] == "{"


def _parses(text: str, *, partial: bool) -> bool:
    try:
        from_json(text, allow_inf_nan=False, allow_partial=partial)
    except ValueError:
        return False
    return True
