"""Schemas of tools, and the validation of their arguments, in bounded time.

References outside the schema are rejected, never fetched. `unevaluatedProperties`, `unevaluatedItems` and patterns that
RE2 cannot match are shown to the model but not enforced.
"""

import json
from collections.abc import Mapping
from typing import Any

from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.schemas.json_schema import require_json_schema
from weft.kernel.schemas.value_check import UncheckedError, ValueCheck, parsed

MAX_SCHEMA_BYTES = 65_536
"""Maximum size of a tool's schema as JSON."""
MAX_SCHEMA_DEPTH = 64
"""Maximum nesting of objects and arrays in a schema."""
MAX_ARGUMENT_BYTES = 1_048_576
"""Maximum size of a call's arguments as JSON."""
MAX_CHECK_CPU_SECONDS = 0.5
"""Maximum processor time of one check, which blocks the event loop."""
MAX_MESSAGE_CHARACTERS = 512
MAX_NUMBER = 2**1023
"""Nearly the largest double: no message can carry larger numbers."""
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


def object_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema as that of an object. Raises ValueError with the obstacle: size, depth, references, validity.

    Numbers that JSON does not have, such as infinity, are rejected too.
    """
    if len(json.dumps(schema, allow_nan=False)) > MAX_SCHEMA_BYTES:
        raise ValueError(f"its schema has more than {MAX_SCHEMA_BYTES} bytes")
    _look_through(schema)
    try:
        require_json_schema(schema, "its schema", has_old_words=False)
    except FieldError as error:
        raise ValueError(error.message) from None
    whole = {"type": "object", **schema}
    if whole["type"] != "object":
        raise ValueError("its schema is not that of an object")
    whole.setdefault("properties", {})
    return whole


def _look_through(schema: Mapping[str, Any]) -> None:
    open_parts: list[tuple[Any, int]] = [(schema, 1)]
    while open_parts:
        part, depth = open_parts.pop()
        if depth > MAX_SCHEMA_DEPTH:
            raise ValueError(f"its schema is more than {MAX_SCHEMA_DEPTH} levels deep")
        if isinstance(part, Mapping):
            for keyword in _REFERENCES:
                target = part.get(keyword)
                if isinstance(target, str) and not target.startswith("#"):
                    raise ValueError("its schema refers to another document, which is never fetched")
            open_parts.extend((value, depth + 1) for value in part.values())
        elif isinstance(part, list):
            open_parts.extend((value, depth + 1) for value in part)
        elif isinstance(part, int) and abs(part) > MAX_NUMBER:
            raise ValueError("its schema contains a number beyond the range of a double")


class ArgumentCheck:
    """The validator of one tool's arguments."""

    def __init__(self, tool: str, schema: Mapping[str, Any]) -> None:
        self.tool = tool
        self.schema = schema
        self._check = ValueCheck(schema, max_cpu_seconds=MAX_CHECK_CPU_SECONDS, is_lenient=True)

    def parse(self, text: str) -> dict[str, Any]:
        """Returns the arguments. Raises TOOL_CALL_INVALID with the error, without repeating all arguments."""
        arguments = self._decode(text)
        try:
            problem = self._check.problem(arguments)
        except UncheckedError as error:
            raise self._invalid(f"they cannot be checked: {error}") from None
        if problem:
            raise self._invalid(problem)
        return arguments

    def _decode(self, text: str) -> dict[str, Any]:
        if len(text) > MAX_ARGUMENT_BYTES:
            raise self._invalid(f"they have more than {MAX_ARGUMENT_BYTES} bytes")
        try:
            arguments = parsed(text.strip() or "{}")
        except (ValueError, RecursionError) as problem:
            raise self._invalid(f"they are not JSON: {str(problem)[:MAX_MESSAGE_CHARACTERS]}") from None
        if not isinstance(arguments, dict):
            raise self._invalid("they are not a JSON object")
        return arguments

    def _invalid(self, why: str) -> WeftError:
        message = f"the arguments for the tool {self.tool} are wrong: {why}"
        return WeftError(Reason.TOOL_CALL_INVALID, message, metadata={"tool": self.tool})
