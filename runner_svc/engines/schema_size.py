"""How large a JSON schema may be that a library turns into a grammar: it writes out every repetition, one by one."""

import json
import re
from typing import Any

MAX_SCHEMA_CHARS = 64 * 1024
MAX_REPETITIONS = 2000
"""Of one item, as llama.cpp's own grammars have it; a thousand million of them would take all the memory there is."""
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength")
_BRACES = re.compile(r"\{(\d*)(?:,(\d*))?\}")


def what_is_too_large(schema: str) -> str:
    """What is too large about a schema, in words; empty: nothing."""
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
        # More digits than a number of ours has are too many, whatever they say.
        counts += [float(digits[:9]) for braces in _BRACES.findall(pattern) for digits in braces if digits]
    return counts
