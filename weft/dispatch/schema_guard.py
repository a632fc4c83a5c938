"""Checks of callers' JSON schemas, before an engine compiles them to grammars.

Engines take schemas on trust: a deep one overflows a stack, a repeat of 10^9 is written out, a pattern runs in an
engine of regular expressions without a time bound, a reference to a file is opened.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, TypeGuard

import msgspec
import re2

from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.json_schema import (
    COUNT_KEYS,
    REFERENCE_KEYS,
    SHOWN_CHARS,
    WITH_SCHEMAS,
    SchemaLimits,
    inner_schemas,
    require_json_schema,
)

_UPPER_BOUNDS: Final = frozenset({"maxContains", "maxItems", "maxLength", "maxProperties"})
# JSON schemas write a character by its number as JavaScript does, RE2 as Perl does.
_CODE_POINT: Final = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|(.))", re.DOTALL)
# Formats that JSON schema defines for what a pattern may say too.
_FORMATS: Final = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uri-reference", "uuid"}
)
_MAX_PATTERN_MEMORY: Final = 256 * 1024

_encode = msgspec.json.Encoder().encode


def require_safe_schema(schema: Mapping[str, Any], field: str, limits: SchemaLimits) -> Mapping[str, Any]:
    """See SchemaGuard.require_safe."""
    return SchemaGuard(limits).require_safe(schema, field)


class SchemaGuard:
    """Checks the schemas of one request, one after the other: some bounds apply to all of them together."""

    def __init__(self, limits: SchemaLimits) -> None:
        self._limits = limits
        self._bytes_left = limits.max_total_bytes
        self._patterns_left = limits.max_patterns

    def require_safe(self, schema: Mapping[str, Any], field: str) -> Mapping[str, Any]:
        """Returns the schema for an engine. Raises INVALID_ARGUMENT naming the unsafe place in `field`.

        An upper bound above `max_repeat` is left out: agents bound the text of a file by its size, no answer is that
        long, and a grammar would be written out that often. So is a pattern that cannot be run safely beside a
        `format` that says the same: zod writes both for an address of mail, its pattern with look-around.
        """
        raw = _encode(schema)
        size = len(raw)
        if size > self._limits.max_bytes:
            raise invalid_field(field, f"must be a schema of at most {self._limits.max_bytes} bytes")
        self._bytes_left -= size
        if self._bytes_left < 0:
            limit = self._limits.max_total_bytes
            raise invalid_field(field, f"is one too many: the schemas of a request have at most {limit} bytes together")
        walk = _Walk(self._limits, self._patterns_left)
        walk.visit(schema, field)
        for place, inner in require_json_schema(schema, field, max_branches=self._limits.max_branches):
            walk.visit(inner, place)
        self._patterns_left = walk.patterns_left
        return _without(schema, walk.left_out) if walk.left_out else schema


class _Walk:
    """One pass over a schema and those within it."""

    def __init__(self, limits: SchemaLimits, patterns_left: int) -> None:
        self._limits = limits
        self._nodes_left = limits.max_nodes
        self._enum_left = limits.max_enum
        self.patterns_left = patterns_left
        self.left_out: dict[int, set[str]] = {}
        """Removed keywords: names by the id of their schema."""

    def visit(self, schema: Mapping[str, Any], field: str, depth: int = 1) -> None:
        """Checks a schema and its subschemas."""
        if depth > self._limits.max_depth:
            raise invalid_field(field, f"is nested deeper than {self._limits.max_depth} schemas")
        self._nodes_left -= 1
        if self._nodes_left < 0:
            raise invalid_field(field, f"is one too many: a schema holds at most {self._limits.max_nodes} schemas")
        for key, value in schema.items():
            if self._is_left_out(key, value, f"{field}.{key}", schema):
                self.left_out.setdefault(id(schema), set()).add(key)
            elif key in _CHECKED:
                self._look_at(key, value, f"{field}.{key}")
            # `patternProperties` is both.
            if key in WITH_SCHEMAS:
                for place, inner in inner_schemas(key, value):
                    self.visit(inner, f"{field}.{key}{place}", depth + 1)

    def _is_left_out(self, key: str, value: object, field: str, schema: Mapping[str, Any]) -> bool:
        if key in _UPPER_BOUNDS:
            return _is_whole(value) and value > self._limits.max_repeat
        return key == "pattern" and not self._is_needed(value, field, schema.get("format"))

    def _look_at(self, key: str, value: object, field: str) -> None:
        if key == "patternProperties":
            for pattern in value if isinstance(value, Mapping) else ():
                self._require_pattern(pattern, field)
        elif key == "enum":
            self._require_enum(value, field)
        elif key in REFERENCE_KEYS:
            _require_local(value, field)
        else:
            self._require_repeat(value, field)

    def _is_needed(self, pattern: object, field: str, form: object) -> bool:
        """Whether a pattern is passed to the engine; raises INVALID_ARGUMENT for an unsafe one without replacement."""
        self._require_short(pattern, field)
        try:
            require_safe_pattern(str(pattern), field)
        except WeftError:
            if form not in _FORMATS:
                raise
            return False
        return True

    def _require_enum(self, values: object, field: str) -> None:
        if not isinstance(values, list):
            raise invalid_field(field, "must be a list of values")
        self._enum_left -= len(values)
        if self._enum_left < 0:
            raise invalid_field(
                field, f"is too long: the enums of a schema have at most {self._limits.max_enum} values"
            )

    def _require_repeat(self, value: object, field: str) -> None:
        if not (_is_whole(value) and 0 <= value <= self._limits.max_repeat):
            raise invalid_field(field, f"must be a whole number from 0 to {self._limits.max_repeat}")

    def _require_pattern(self, pattern: object, field: str) -> None:
        self._require_short(pattern, field)
        require_safe_pattern(str(pattern), field)

    def _require_short(self, pattern: object, field: str) -> None:
        limit = self._limits.max_pattern_chars
        if not isinstance(pattern, str) or len(pattern) > limit:
            raise invalid_field(field, f"must be a pattern of at most {limit} characters")
        self.patterns_left -= 1
        if self.patterns_left < 0:
            raise invalid_field(field, f"is one too many: at most {self._limits.max_patterns} patterns in a request")


def _is_whole(value: object) -> TypeGuard[float]:
    # 3.0 is a whole number to JSON schema.
    return isinstance(value, int | float) and not isinstance(value, bool) and value == int(value)


def _without(value: Any, names: Mapping[int, set[str]]) -> Any:
    """Returns a copy of a schema without the removed keywords."""
    if isinstance(value, dict):
        left_out = names.get(id(value), ())
        return {key: _without(inner, names) for key, inner in value.items() if key not in left_out}
    return [_without(inner, names) for inner in value] if isinstance(value, list) else value


def require_safe_pattern(pattern: str, field: str) -> None:
    """Raises INVALID_ARGUMENT naming `field` for a pattern that cannot be matched in linear time and little memory."""
    options = re2.Options()
    options.log_errors = False
    options.max_mem = _MAX_PATTERN_MEMORY
    try:
        re2.compile(_CODE_POINT.sub(_as_perl, pattern), options)
    except (re2.error, UnicodeEncodeError) as error:
        raise invalid_field(field, f"is no pattern that is safe to run: {_words_of(error)}") from None


def _as_perl(found: re.Match[str]) -> str:
    return f"\\x{{{found[1]}}}" if found[1] else found[0]


def _words_of(error: Exception) -> str:
    if isinstance(error, UnicodeEncodeError):
        return "it is no text"
    words = error.args[0] if error.args else ""
    text = words.decode("utf-8", "replace") if isinstance(words, bytes) else str(words)
    return f"{text[:SHOWN_CHARS]} (look-around and back-references are not supported)"


_CHECKED: Final = frozenset({"patternProperties", "enum", *REFERENCE_KEYS, *COUNT_KEYS})


def _require_local(reference: object, field: str) -> None:
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise invalid_field(field, "must refer to a place in this schema, as in '#/$defs/name'")
