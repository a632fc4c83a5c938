"""What an answer says beside its text: signals of the model, warnings, and tools that the mesh runs for it."""

from weft.api.common.v1 import event_pb2, signal_pb2, warning_pb2
from weft.kernel.json_objects import plain_object

NOTICES = frozenset({"signal", "warning", "tool_call", "tool_result"})
"""The events that are such, by their names in InferenceEvent."""
MAX_NOTICES_TOLD = 64
"""So many signals, and so many warnings, an answer in one piece holds; as a receipt."""

_CODE_PREFIX = "WARNING_CODE_"


def notice_json(event: event_pb2.InferenceEvent, kind: str) -> dict[str, object]:
    """A notice as JSON values."""
    if kind == "signal":
        return signal_json(event.signal)
    if kind == "warning":
        return warning_json(event.warning)
    if kind == "tool_call":
        call = event.tool_call
        return {"id": call.id, "name": call.name, "arguments": plain_object(call.arguments)}
    result = event.tool_result
    return {"id": result.id, "failed": result.failed, "content": result.content}


def notice_words(event: event_pb2.InferenceEvent, kind: str) -> str:
    """A notice in a few words: what happened, and its name."""
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
    """A signal of the model."""
    return {"name": signal.name, "arguments": plain_object(signal.arguments)}


def warning_json(warning: warning_pb2.Warning) -> dict[str, object]:
    """A warning; its field is null where it is about none."""
    return {"code": _code(warning), "field": warning.field or None, "message": warning.message}


def _code(warning: warning_pb2.Warning) -> str:
    """The code as callers read it; one that is newer than this code is "unspecified"."""
    known = warning.code in warning_pb2.WarningCode.values()
    name = warning_pb2.WarningCode.Name(warning.code) if known else f"{_CODE_PREFIX}UNSPECIFIED"
    return name.removeprefix(_CODE_PREFIX).lower()
