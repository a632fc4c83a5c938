"""Plain JSON data as typed messages, order and number kinds kept."""

from collections.abc import Mapping
from typing import Any

from weft.api.common.v1 import json_value_pb2

MAX_SENT_DEPTH = 28
"""Objects and arrays within each other in what is sent: protobuf reads messages 100 deep, and an object costs three."""
MAX_SCHEMA_DEPTH = 128
"""The same for schemas, which stay in this process."""
_INT64 = range(-(2**63), 2**63)


def json_object(value: Mapping[str, Any], max_depth: int = MAX_SENT_DEPTH) -> json_value_pb2.JsonObject:
    """A JSON object as a message. Raises ValueError for one that is nested too deeply, or holds too large a number."""
    target = json_value_pb2.JsonObject()
    try:
        _fill_object(target, value, max_depth)
    except OverflowError:
        raise ValueError("it holds a number beyond the range of a double") from None
    return target


def _fill_object(target: json_value_pb2.JsonObject, value: Mapping[str, Any], room: int) -> None:
    if room <= 0:
        raise ValueError("it is nested too deeply")
    for name, member in value.items():
        _fill(target.fields.add(name=name).value, member, room - 1)


def _fill(target: json_value_pb2.JsonValue, value: Any, room: int) -> None:
    match value:
        case None:
            target.null_value = True
        case bool():
            target.bool_value = value
        case int() if value in _INT64:
            target.integer_value = value
        case int() | float():
            target.number_value = float(value)
        case str():
            target.string_value = value
        case list() | tuple():
            target.array_value.SetInParent()
            if room <= 0:
                raise ValueError("it is nested too deeply")
            for element in value:
                _fill(target.array_value.values.add(), element, room - 1)
        case _:
            target.object_value.SetInParent()
            _fill_object(target.object_value, value, room)
