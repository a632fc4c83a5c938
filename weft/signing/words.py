"""An action in words, for those who are asked to agree: from the action itself, and nothing that is set is left out."""

import json
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from weft.api.operations.v1 import operation_pb2
from weft.kernel.names import MAX_NAME_CHARS, is_token
from weft.signing.actions import operation_word

_VERBS = {"model-load": "load", "model-unload": "unload", "cache-flush": "flush the cache of"}
_EVERYTHING = "every model"


def in_words(action: operation_pb2.OperationAction) -> list[str]:
    """A headline such as "load qwen", then a line `name: value` for each thing that is set beside the model.

    Raises MalformedToken for an action that does nothing.
    """
    verb = _VERBS[operation_word(action)]
    work = getattr(action, str(action.WhichOneof("kind")))
    return [f"{verb} {_quoted(work.model) if work.model else _EVERYTHING}", *_lines(work, ("model",))]


def _lines(message: Message, left_out: tuple[str, ...] = ()) -> Iterator[str]:
    for field, value in message.ListFields():
        if field.name not in left_out:
            yield from _told(field, value)


def _told(field: FieldDescriptor, value: Any) -> Iterator[str]:
    if field.message_type is None:
        yield f"{field.name}: {_word(field, value)}"
    elif field.message_type.GetOptions().map_entry:
        for name in sorted(value):
            yield f"{name}: {_value(value[name])}"
    elif isinstance(value, Duration):
        yield f"{field.name}: {value.ToJsonString()}"
    else:
        yield from _lines(value)


def _value(value: Message) -> str:
    return ", ".join(_word(field, inner) for field, inner in value.ListFields()) or "nothing"


def _word(field: FieldDescriptor, value: Any) -> str:
    if field.enum_type is not None:
        found = field.enum_type.values_by_number.get(value)
        return str(value) if found is None else found.name.rpartition("_")[2].lower()
    if isinstance(value, bool):
        return "yes" if value else "no"
    return _quoted(value) if isinstance(value, str) else str(value)


def _quoted(text: str) -> str:
    """Plain names as they are; anything that could be read as something else in quotes."""
    return text if is_token(text, MAX_NAME_CHARS) else json.dumps(text)
