"""The size of JSON schemas of answers: the library makes grammars of them, and has no limits itself. Pure."""

import json
import re
from typing import Any

MAX_SCHEMA_CHARS = 64 * 1024
MAX_REPETITIONS = 2000
"""Maximum number of repetitions of one item, as in llama.cpp's own grammars; 10**9 would take all memory."""
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength")
_BRACES = re.compile(r"\{(\d*)(?:,(\d*))?\}")


def schema_fault(schema: str) -> str:
    """Returns the fault of a schema that is too large; empty: none."""
    if len(schema) > MAX_SCHEMA_CHARS:
        return f"the schema must be at most {MAX_SCHEMA_CHARS:,} characters"
    left: list[Any] = [json.loads(schema)]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += part
        elif isinstance(part, dict):
            if any(count > MAX_REPETITIONS for count in _counts(part)):
                return f"at most {MAX_REPETITIONS:,} repetitions can be asked for"
            left += part.values()
    return ""


def _counts(part: dict[str, Any]) -> list[float]:
    counts = [value for name in _COUNTS if isinstance(value := part.get(name), int | float)]
    pattern = part.get("pattern")
    if isinstance(pattern, str):
        # Nine digits are over the limit already.
        counts += [float(digits[:9]) for braces in _BRACES.findall(pattern) for digits in braces if digits]
    return counts
