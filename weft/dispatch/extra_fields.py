"""Unknown fields of engine messages and tool calls: they arrive in pieces and are sent back complete."""

from collections.abc import Iterable, Mapping
from typing import Any

from weft.api.common.v1 import json_value_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.text.json_objects import plain_object, to_json_object

JsonMap = dict[str, Any]
CARRIED = frozenset({"extra_content", "provider_specific_fields", "reasoning_details", "thought_signature"})
"""Fields known to be sent by providers and required in the next turn: Gemini, OpenRouter, LiteLLM."""
OF_FUNCTION = "function"
"""The key of a tool call's function fields."""
_ANSWER_ONLY = frozenset({"annotations", "audio", "index", "parsed"})
"""OpenAI answer fields that no engine accepts as input."""
_TEXTS = frozenset({"text", "summary", "thinking"})
"""Members of reasoning details whose pieces are concatenated."""
_SAME = ("type", "index", "id")
"""A piece continues the previous one if these members are equal."""


def joined_fields(pieces: json_value_pb2.JsonObject) -> json_value_pb2.JsonObject:
    """Merges fields that arrived several times under the same name."""
    whole: JsonMap = {}
    for member in pieces.fields:
        join_fields(whole, plain_object(json_value_pb2.JsonObject(fields=[member])))
    return to_json_object(whole, "extra_fields")


def handed_back(given: Mapping[str, Any] | None) -> json_value_pb2.JsonObject:
    """Returns the non-empty fields of an earlier turn to send back to its engine.

    Values that no message can represent are dropped: an earlier turn must not end a conversation.
    """
    found = {
        name: value
        for name, value in (given or {}).items()
        if name not in _ANSWER_ONLY and value is not None and value not in ("", [], {})
    }
    try:
        return to_json_object(found, "extra_fields")
    except (WeftError, ValueError):
        return json_value_pb2.JsonObject()


def carried_only(fields: Mapping[str, Any] | None) -> JsonMap:
    """Returns only fields known to be required by providers, including those of a call's function."""
    found = {name: value for name, value in (fields or {}).items() if name in CARRIED}
    of_function = (fields or {}).get(OF_FUNCTION)
    if isinstance(of_function, dict) and (nested := carried_only(of_function)):
        found[OF_FUNCTION] = nested
    return found


def join_fields(whole: JsonMap, piece: Mapping[str, Any]) -> None:
    """Adds a piece in place: lists are extended, objects are merged, other values are replaced."""
    for name, value in piece.items():
        known = whole.get(name)
        if isinstance(known, dict) and isinstance(value, dict):
            join_fields(known, value)
        elif isinstance(known, list) and isinstance(value, list):
            _join_lists(known, value)
        else:
            whole[name] = value


def _join_lists(known: list[Any], more: Iterable[Any]) -> None:
    for value in more:
        last = known[-1] if known else None
        if isinstance(last, dict) and isinstance(value, dict) and _continues(last, value):
            texts = {name: last[name] + value[name] for name in _TEXTS & last.keys() & value.keys()}
            last.update({name: member for name, member in value.items() if member is not None} | texts)
        else:
            known.append(value)


def _continues(last: JsonMap, value: JsonMap) -> bool:
    """Whether an entry is another piece of the last one: text of the same type and index."""
    if not all(isinstance(last.get(name, ""), str) and isinstance(value.get(name, ""), str) for name in _TEXTS):
        return False
    has_text = bool(_TEXTS & last.keys()) and bool(_TEXTS & value.keys() or "signature" in value)
    return has_text and all(last.get(name) == value.get(name) for name in _SAME)
