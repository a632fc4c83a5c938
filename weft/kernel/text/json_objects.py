"""Conversion between JSON messages and plain data, keeping order and number types."""

import math
from collections.abc import Mapping
from typing import Any

from weft.api.common.v1 import json_value_pb2
from weft.kernel.errors.error_tree import invalid_field

# Protobuf rejects messages nested deeper than 100; the payload and its envelope use up to 10 levels. An object costs
# three (value, object, field), an array two.
MAX_NESTED_MESSAGES = 90
_OBJECT_COST = 3
_ARRAY_COST = 2
_MAX_INT64 = 2**63 - 1


def plain_object(document: json_value_pb2.JsonObject) -> dict[str, Any]:
    """Returns a JSON object as plain data, in order; the last of several members with one name wins."""
    return {member.name: _plain(member.value) for member in document.fields}


def to_json_object(
    value: Mapping[str, object], field: str, max_nested: int = MAX_NESTED_MESSAGES
) -> json_value_pb2.JsonObject:
    """Returns a JSON object as a message. Raises INVALID_ARGUMENT naming `field` if it is too deep or not JSON."""
    target = json_value_pb2.JsonObject()
    _fill_object(target, value, field, max_nested)
    return target


def add_member(target: json_value_pb2.JsonObject, name: str, value: object, field: str) -> None:
    """Adds a member to an object. Raises INVALID_ARGUMENT like `to_json_object`."""
    _fill_value(target.fields.add(name=name).value, value, field, MAX_NESTED_MESSAGES - _OBJECT_COST)


def _plain(value: json_value_pb2.JsonValue) -> Any:
    kind = value.WhichOneof("kind")
    match kind:
        case None | "null_value":
            return None
        case "array_value":
            return [_plain(element) for element in value.array_value.values]
        case "object_value":
            return plain_object(value.object_value)
        case _:
            return getattr(value, kind)


def _fill_object(target: json_value_pb2.JsonObject, value: Mapping[str, object], field: str, room: int) -> None:
    """`room` is the number of message levels that are left."""
    if room < _OBJECT_COST:
        raise invalid_field(field, "is nested too deeply")
    for name, member in value.items():
        _fill_value(target.fields.add(name=name).value, member, field, room - _OBJECT_COST)


def _fill_value(target: json_value_pb2.JsonValue, value: object, field: str, room: int) -> None:
    match value:
        case None:
            target.null_value = True
        case bool():
            target.bool_value = value
        case int() if -_MAX_INT64 - 1 <= value <= _MAX_INT64:
            target.integer_value = value
        case int() | float():
            target.number_value = _finite(value, field)
        case str():
            target.string_value = value
        case list() | tuple():
            target.array_value.SetInParent()
            if room < _ARRAY_COST:
                raise invalid_field(field, "is nested too deeply")
            for element in value:
                _fill_value(target.array_value.values.add(), element, field, room - _ARRAY_COST)
        case Mapping():
            target.object_value.SetInParent()
            _fill_object(target.object_value, value, field, room)
        case _:
            raise invalid_field(field, "contains invalid JSON")


def _finite(value: float, field: str) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise invalid_field(field, "contains a number beyond the range of a double")
    return number
