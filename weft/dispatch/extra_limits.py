"""How much a request may hold of parameters that weft does not know: as common/v1/chat.proto says."""

import json
from typing import Any

from weft.api.common.v1 import json_value_pb2
from weft.kernel.errors import invalid_field
from weft.kernel.json_objects import plain_object

MAX_EXTRA_FIELDS = 64
MAX_EXTRA_NAME_CHARS = 128
MAX_EXTRA_BYTES = 128 * 1024
"""Names and values together, as JSON: room for a grammar of 64 KiB."""

_TOO_LARGE = f"is too large: all such parameters together may be {MAX_EXTRA_BYTES} bytes of JSON"
_MOST_FRAMING = 4
"""A message takes less than this times the bytes of its JSON."""

# Step by step, so that the size of something huge is not counted to its end.
_steps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).iterencode


def take_bytes(budget: int, name: str, value: Any, field: str) -> int:
    """What is left of `budget` bytes after one more member; raises INVALID_ARGUMENT naming `field` for too much."""
    left = budget - len(name.encode()) - len('"":,')
    try:
        for step in _steps(value):
            left -= len(step.encode())
            if left < 0:
                raise invalid_field(field, _TOO_LARGE)
    except ValueError:
        raise invalid_field(field, "holds a number beyond the range of a double") from None
    return left


def check_extra(extra: json_value_pb2.JsonObject, field: str) -> None:
    """Raises INVALID_ARGUMENT naming `field` or a member of it."""
    if len(extra.fields) > MAX_EXTRA_FIELDS:
        raise invalid_field(field, f"must have at most {MAX_EXTRA_FIELDS} members, has {len(extra.fields)}")
    if extra.ByteSize() > MAX_EXTRA_BYTES * _MOST_FRAMING:
        raise invalid_field(field, _TOO_LARGE)
    plain, left = plain_object(extra), MAX_EXTRA_BYTES
    if len(plain) < len(extra.fields):
        raise invalid_field(field, "must not have two members of one name")
    for index, (name, value) in enumerate(plain.items()):
        if not 0 < len(name) <= MAX_EXTRA_NAME_CHARS:
            raise invalid_field(f"{field}.fields[{index}].name", f"must be 1 to {MAX_EXTRA_NAME_CHARS} characters")
        left = take_bytes(left, name, value, f"{field}.{name}")
