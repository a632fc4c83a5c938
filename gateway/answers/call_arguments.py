"""Arguments of tool calls as JSON objects, for APIs with objects instead of text in calls."""

import msgspec
from pydantic_core import from_json

from gateway.answers.answer_builder import CalledTool
from weft.api.common.v1 import event_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

# Finish reasons after which a tool call may be incomplete without an error of the model.
CUTTING = frozenset({event_pb2.FINISH_REASON_LENGTH, event_pb2.FINISH_REASON_CONTENT_FILTER})
CALL_CUT = "tool_call_cut"
"""Code of the warning about a call that the end of the answer truncated."""


def arguments_object(call: CalledTool, *, is_cut: bool) -> msgspec.Raw | None:
    """Returns the arguments of a call; None: the end of the answer truncated them (`is_cut`).

    They remain the model's text, because numbers may have more digits than the encoder supports, on one line, because
    lines divide the events of a stream. Raises TOOL_CALL_INVALID if they are not a JSON object.
    """
    # A call without arguments has no text.
    arguments = call.arguments if call.arguments.strip() else "{}"
    if is_whole_object(arguments):
        return msgspec.Raw(msgspec.json.format(arguments.encode(), indent=-1))
    if not is_cut:
        raise bad_arguments()
    return None


def cut_call(call: CalledTool) -> dict[str, object]:
    """Returns the warning about a truncated call, as JSON values."""
    message = f"the answer ended within a call of {call.name[:64]}, which was left out"
    return {"code": CALL_CUT, "field": None, "message": message}


def is_whole_object(text: str) -> bool:
    """Whether all of `text` is one JSON object."""
    return _is_object_so_far(text) and _parses(text, partial=False)


def is_object_so_far(text: str) -> bool:
    """Whether `text` can be the beginning of a JSON object for the parsers of clients."""
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
