"""What an answer says beside its text, in one line each: signals, warnings, and tools that the mesh runs for it."""

import json

from weft.api.common.v1 import event_pb2, json_value_pb2
from weft.kernel.json_objects import plain_object

MAX_SHOWN_CHARS = 160
"""So much of the arguments of a signal or a tool, and of what a tool answered."""


def notice(event: event_pb2.InferenceEvent) -> str:
    """The line for an event; empty for one that is none of these."""
    match event.WhichOneof("event"):
        case "signal":
            return f"signal {event.signal.name}{_arguments(event.signal.arguments)}"
        case "warning":
            return f"warning: {event.warning.message}"
        case "tool_call":
            return f"tool {event.tool_call.name}{_arguments(event.tool_call.arguments)}"
        case "tool_result":
            outcome = "failed" if event.tool_result.failed else "answered"
            return f"tool {outcome}: {_cut(event.tool_result.content)}"
        case _:
            return ""


def _arguments(arguments: json_value_pb2.JsonObject) -> str:
    given = plain_object(arguments)
    return f" {_cut(json.dumps(given, ensure_ascii=False))}" if given else ""


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[: MAX_SHOWN_CHARS - 1]}…"
