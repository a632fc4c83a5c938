"""Plain JSON data of models and tools as typed messages."""

from collections.abc import Mapping
from typing import Any

from weft.api.common.v1 import json_value_pb2
from weft.kernel.errors import FieldError
from weft.kernel.json_objects import to_json_object

MAX_SENT_DEPTH = 28
"""Objects within each other in what is sent: protobuf reads messages 100 deep, and an object costs three."""
MAX_SCHEMA_DEPTH = 128
"""The same for schemas, which stay in this process."""
_MESSAGES_PER_OBJECT = 3


def json_object(value: Mapping[str, Any], max_depth: int = MAX_SENT_DEPTH) -> json_value_pb2.JsonObject:
    """A JSON object as a message. Raises ValueError for one that is nested too deeply, or holds too large a number."""
    try:
        return to_json_object(value, "it", max_depth * _MESSAGES_PER_OBJECT)
    except FieldError as error:
        raise ValueError(error.message.replace("it: ", "it ", 1)) from None
