"""JSON that travels as typed messages, as plain data again."""

from typing import Any

from weft.api.common.v1 import json_value_pb2


def plain_object(document: json_value_pb2.JsonObject) -> dict[str, Any]:
    """A JSON object as plain data, order kept; of members with one name the last one counts."""
    return {member.name: _plain(member.value) for member in document.fields}


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
