"""JSON schemas from callers, before an engine makes a grammar of them.

Engines take schemas on trust: a deep one overflows a stack, a repeat of 10^9 is written out, a pattern runs in an
engine of regular expressions without a time bound, a reference to a file is opened.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NoReturn, TypeGuard

import msgspec
import re2

from gateway.config import SchemaLimits
from weft.kernel.errors import invalid_field

_TYPES: Final = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_SCHEMA_KEYS: Final = (
    "additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not",
    "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_LIST_KEYS: Final = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_MAP_KEYS: Final = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
_REPEAT_KEYS: Final = (
    "maxContains", "maxItems", "maxLength", "maxProperties", "minContains", "minItems", "minLength", "minProperties",
)  # fmt: skip
_UPPER_BOUNDS: Final = frozenset({"maxContains", "maxItems", "maxLength", "maxProperties"})
_REFERENCES: Final = ("$ref", "$dynamicRef", "$recursiveRef")
# JSON schemas write a character by its number as JavaScript does, RE2 as Perl does.
_CODE_POINT: Final = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|(.))", re.DOTALL)
_MAX_PATTERN_MEMORY: Final = 256 * 1024
_MAX_REFERENCES_IN_A_ROW: Final = 64
_MAX_INDEX_DIGITS: Final = 6
_SHOWN_CHARS: Final = 64

_encode = msgspec.json.Encoder().encode


def require_safe_schema(schema: Mapping[str, Any], field: str, limits: SchemaLimits) -> Mapping[str, Any]:
    """See SchemaGuard.require_safe."""
    return SchemaGuard(limits).require_safe(schema, field)


class SchemaGuard:
    """Looks at the schemas of one request, one after the other: some bounds are for all of them together."""

    def __init__(self, limits: SchemaLimits) -> None:
        self._limits = limits
        self._bytes_left = limits.max_total_bytes
        self._patterns_left = limits.max_patterns

    def require_safe(self, schema: Mapping[str, Any], field: str) -> Mapping[str, Any]:
        """The schema for an engine. Raises INVALID_ARGUMENT naming the place in `field` that no engine should see.

        An upper bound above `max_repeat` is left out: agents bound the text of a file by its size, no answer is that
        long, and a grammar would be written out that often.
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
        self._patterns_left = walk.patterns_left
        if any(name in raw for name in _COMBINING_BYTES):
            _Branches(schema, self._limits.max_branches).require_few(field)
        return _without(schema, walk.too_wide) if walk.too_wide else schema


class _Walk:
    """One pass over a schema and those within it."""

    def __init__(self, limits: SchemaLimits, patterns_left: int) -> None:
        self._limits = limits
        self._nodes_left = limits.max_nodes
        self._enum_left = limits.max_enum
        self.patterns_left = patterns_left
        self.too_wide: dict[int, set[str]] = {}
        """Upper bounds that are none: names by the id of the schema that has them."""

    def visit(self, schema: Mapping[str, Any], field: str, depth: int = 1) -> None:
        """Look at a schema, then at those within it."""
        if depth > self._limits.max_depth:
            raise invalid_field(field, f"is nested deeper than {self._limits.max_depth} schemas")
        self._nodes_left -= 1
        if self._nodes_left < 0:
            raise invalid_field(field, f"is one too many: a schema holds at most {self._limits.max_nodes} schemas")
        for key, value in schema.items():
            if key in _UPPER_BOUNDS and _is_whole(value) and value > self._limits.max_repeat:
                self.too_wide.setdefault(id(schema), set()).add(key)
            elif key in _CHECKED:
                self._look_at(key, value, f"{field}.{key}")
            # `patternProperties` is both.
            if key in _WITH_SCHEMAS:
                for place, inner in _inner(key, value):
                    self.visit(inner, f"{field}.{key}{place}", depth + 1)

    def _look_at(self, key: str, value: object, field: str) -> None:
        if key == "type":
            _require_types(value, field)
        elif key == "pattern":
            self._require_pattern(value, field)
        elif key == "patternProperties":
            for pattern in value if isinstance(value, Mapping) else ():
                self._require_pattern(pattern, field)
        elif key == "enum":
            self._require_enum(value, field)
        elif key in _REFERENCES:
            _require_local(value, field)
        else:
            self._require_repeat(value, field)

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
        limit = self._limits.max_pattern_chars
        if not isinstance(pattern, str) or len(pattern) > limit:
            raise invalid_field(field, f"must be a pattern of at most {limit} characters")
        self.patterns_left -= 1
        if self.patterns_left < 0:
            raise invalid_field(field, f"is one too many: at most {self._limits.max_patterns} patterns in a request")
        require_safe_pattern(pattern, field)


def _is_whole(value: object) -> TypeGuard[float]:
    # 3.0 is a whole number to JSON schema.
    return isinstance(value, int | float) and not isinstance(value, bool) and value == int(value)


def _without(value: Any, names: Mapping[int, set[str]]) -> Any:
    """A copy of a schema without the names that are listed by the id of what has them."""
    if isinstance(value, dict):
        left_out = names.get(id(value), ())
        return {key: _without(inner, names) for key, inner in value.items() if key not in left_out}
    return [_without(inner, names) for inner in value] if isinstance(value, list) else value


def require_safe_pattern(pattern: str, field: str) -> None:
    """Raises INVALID_ARGUMENT naming `field` for what cannot be matched in linear time and little memory."""
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
    return f"{text[:_SHOWN_CHARS]} (look-around and back-references are not supported)"


def _inner(key: str, value: object) -> list[tuple[str, Mapping[str, Any]]]:
    """The schemas under a key, with their places."""
    if isinstance(value, dict):
        if key not in _MAP_KEYS:
            return [("", value)]
        return [(f".{name[:_SHOWN_CHARS]}", inner) for name, inner in value.items() if isinstance(inner, dict)]
    if isinstance(value, list) and key in _LIST_KEYS:
        return [(f"[{index}]", inner) for index, inner in enumerate(value) if isinstance(inner, dict)]
    return []


_WITH_SCHEMAS: Final = frozenset({*_SCHEMA_KEYS, *_LIST_KEYS, *_MAP_KEYS})
_CHECKED: Final = frozenset({"type", "pattern", "patternProperties", "enum", *_REFERENCES, *_REPEAT_KEYS})


def _require_types(value: object, field: str) -> None:
    if isinstance(value, str) and value in _TYPES:
        return
    names = value if isinstance(value, list) else [value]
    if not names or any(not isinstance(name, str) or name not in _TYPES for name in names):
        raise invalid_field(field, f"must be one or more of {', '.join(sorted(_TYPES))}")


def _require_local(reference: object, field: str) -> None:
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise invalid_field(field, "must refer to a place in this schema, as in '#/$defs/name'")


class _Branches:
    """In how many ways the alternatives of a schema combine, references followed.

    Properties and items do not multiply: each has a rule of its own in a grammar.
    """

    def __init__(self, root: Mapping[str, Any], most: int) -> None:
        self._root = root
        self._most = most
        self._known: dict[int, int] = {}
        self._open: set[int] = set()

    def require_few(self, field: str) -> None:
        """Raises INVALID_ARGUMENT naming `field` for too many, or for a schema that is defined by itself alone."""
        self._field = field
        for schema in self._all(self._root):
            self._count(schema)

    def _all(self, schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        yield schema
        for key in schema.keys() & _WITH_SCHEMAS:
            for _, inner in _inner(key, schema[key]):
                yield from self._all(inner)

    def _count(self, schema: Mapping[str, Any]) -> int:
        known = self._known.get(id(schema))
        if known is not None:
            return known
        if id(schema) in self._open:
            self._refuse("must not be defined by itself alone: a reference leads back to where it stands")
        if not schema.keys() & _COMBINING:
            return 1
        if len(self._open) == _MAX_REFERENCES_IN_A_ROW:
            self._refuse(f"must not lead through more than {_MAX_REFERENCES_IN_A_ROW} references in a row")
        self._open.add(id(schema))
        count = 1
        for key in ("anyOf", "oneOf"):
            if key in schema:
                count *= sum(self._count(inner) for _, inner in _inner(key, schema[key])) or 1
        for _, inner in _inner("allOf", schema.get("allOf")):
            count *= self._count(inner)
        target = self._target(schema.get("$ref"))
        if target is not None:
            count *= self._count(target)
        if count > self._most:
            self._refuse(f"has more than {self._most} combinations of anyOf, oneOf and allOf")
        self._open.remove(id(schema))
        self._known[id(schema)] = count
        return count

    def _target(self, reference: object) -> Mapping[str, Any] | None:
        """What a reference leads to; None where it is no path, or leads nowhere."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            return None
        found: object = self._root
        for step in reference.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping):
                found = found.get(name)
            elif isinstance(found, list) and name.isascii() and name.isdigit() and len(name) <= _MAX_INDEX_DIGITS:
                found = found[int(name)] if int(name) < len(found) else None
            else:
                return None
        return found if isinstance(found, Mapping) else None

    def _refuse(self, message: str) -> NoReturn:
        raise invalid_field(self._field, message)


_COMBINING: Final = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
_COMBINING_BYTES: Final = tuple(f'"{name}"'.encode() for name in sorted(_COMBINING))
