"""Fields of an engine's messages and calls that weft does not know: they arrive in pieces and are handed back whole."""

from collections.abc import Iterable, Mapping
from typing import Any

from weft.api.common.v1 import json_value_pb2
from weft.kernel.errors import WeftError
from weft.kernel.json_objects import plain_object, to_json_object

JsonMap = dict[str, Any]
CARRIED = frozenset({"extra_content", "provider_specific_fields", "reasoning_details", "thought_signature"})
"""Fields that providers are known to send with a turn and to need in the next one: Gemini, OpenRouter, LiteLLM."""
OF_FUNCTION = "function"
"""Where a call has the fields of its function."""
_ANSWER_ONLY = frozenset({"annotations", "audio", "index", "parsed"})
"""Fields of OpenAI's answers that no engine takes back."""
_TEXTS = frozenset({"text", "summary", "thinking"})
"""Members of reasoning details whose pieces are joined."""
_SAME = ("type", "index", "id")
"""Members by which a piece continues the piece before it."""


def joined_fields(pieces: json_value_pb2.JsonObject) -> json_value_pb2.JsonObject:
    """Returns fields in which a name that came several times is one."""
    whole: JsonMap = {}
    for member in pieces.fields:
        join_fields(whole, plain_object(json_value_pb2.JsonObject(fields=[member])))
    return to_json_object(whole, "extra_fields")


def handed_back(given: Mapping[str, Any] | None) -> json_value_pb2.JsonObject:
    """Returns the fields of an earlier turn that its engine gets back: those that hold anything.

    What no message can hold is left out, because an earlier turn must not end a conversation.
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
    """Returns the fields that providers are known to need, those of a call's function included."""
    found = {name: value for name, value in (fields or {}).items() if name in CARRIED}
    of_function = (fields or {}).get(OF_FUNCTION)
    if isinstance(of_function, dict) and (nested := carried_only(of_function)):
        found[OF_FUNCTION] = nested
    return found


def join_fields(whole: JsonMap, piece: Mapping[str, Any]) -> None:
    """Add a piece: lists continue, objects are joined, and anything else is replaced."""
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
    """Whether an entry is a further piece of the last one: a text of the same type and number."""
    if not all(isinstance(last.get(name, ""), str) and isinstance(value.get(name, ""), str) for name in _TEXTS):
        return False
    has_text = bool(_TEXTS & last.keys()) and bool(_TEXTS & value.keys() or "signature" in value)
    return has_text and all(last.get(name) == value.get(name) for name in _SAME)
