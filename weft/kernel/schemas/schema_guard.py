"""Checks of callers' JSON schemas before an engine compiles them to grammars.

Engines do not check schemas: a deep one overflows the stack, a repeat of 10^9 is written out, a pattern runs in a
regex engine without a time limit, a reference to a file is opened.
"""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeGuard

import msgspec
import re2

from weft.kernel.errors.error_tree import FieldError, WeftError, invalid_field
from weft.kernel.schemas.grammar_ambiguity import MAX_WAYS, pattern_ways
from weft.kernel.schemas.json_schema import (
    COUNT_KEYS,
    LIST_KEYS,
    MAP_KEYS,
    REFERENCE_KEYS,
    SHOWN_CHARS,
    WITH_SCHEMAS,
    OnFault,
    SchemaFault,
    SchemaLimits,
    inner_schemas,
    refuse_fault,
    require_json_schema,
)

_UPPER_BOUNDS: Final = frozenset({"maxContains", "maxItems", "maxLength", "maxProperties"})
# JSON schemas write code points as in JavaScript, RE2 as in Perl.
_CODE_POINT: Final = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|(.))", re.DOTALL)
# Formats that can replace a pattern.
_FORMATS: Final = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uri-reference", "uuid"}
)
_MAX_PATTERN_MEMORY: Final = 256 * 1024
_FLAGS_STAY: Final = frozenset({"additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties"})
"""Keywords that engines accept with a boolean."""
MAX_REPAIRS: Final = 8
"""Maximum repair passes of a schema, since a repaired schema may have further faults."""
ANY_ARGUMENTS: Final[Mapping[str, Any]] = MappingProxyType({"type": "object"})

_encode = msgspec.json.Encoder().encode


def require_safe_schema(schema: Mapping[str, Any], field: str, limits: SchemaLimits) -> Mapping[str, Any]:
    """See SchemaGuard.require_safe."""
    return SchemaGuard(limits).require_safe(schema, field)


class SchemaGuard:
    """Checks the schemas of one request in turn, since some limits apply to all of them together."""

    def __init__(self, limits: SchemaLimits) -> None:
        self._limits = limits
        self._bytes_left = limits.max_total_bytes
        self._patterns_left = limits.max_patterns

    def require_safe(self, schema: Mapping[str, Any], field: str) -> Mapping[str, Any]:
        """Returns the schema for an engine. Raises INVALID_ARGUMENT naming the unsafe part below `field`.

        Removes upper bounds above `max_repeat`, which would make the grammar too large: agents limit a file's text by
        its size, and no answer is that long. Removes unsafe patterns beside an equivalent `format`: for email addresses
        zod writes both, with look-around in the pattern. Replaces `true` and `false` by objects, because llama.cpp
        accepts no other schemas.
        """
        self._take_bytes(schema, field)
        return self._checked(schema, field, refuse_fault)

    def fitted(self, schema: Mapping[str, Any], field: str) -> tuple[Mapping[str, Any], list[SchemaFault]]:
        """Returns the schema without the parts that `require_safe` rejects, and their faults.

        Raises INVALID_ARGUMENT only if the schema, or all schemas together, are too large.
        """
        self._take_bytes(schema, field)
        faults: list[SchemaFault] = []
        for _ in range(MAX_REPAIRS):
            found: list[SchemaFault] = []
            checked = self._checked(schema, field, found.append)
            if not found:
                return checked, faults
            faults += found
            schema = _repaired(schema, found)
        faults.append(SchemaFault(field=field, message="has more faults than can be left out", holder=schema, keys=()))
        return ANY_ARGUMENTS, faults

    def _take_bytes(self, schema: Mapping[str, Any], field: str) -> None:
        size = len(_encode(schema))
        if size > self._limits.max_bytes:
            raise invalid_field(field, f"must be a schema of at most {self._limits.max_bytes} bytes")
        self._bytes_left -= size
        if self._bytes_left < 0:
            limit = self._limits.max_total_bytes
            raise invalid_field(field, f"is one too many: the schemas of a request have at most {limit} bytes together")

    def _checked(self, schema: Mapping[str, Any], field: str, on_fault: OnFault) -> Mapping[str, Any]:
        is_faulty = False

        def note(fault: SchemaFault) -> None:
            nonlocal is_faulty
            is_faulty = True
            on_fault(fault)

        walk = _Walk(self._limits, self._patterns_left, note)
        walk.visit(schema, field)
        if is_faulty:
            return schema  # the next check needs a bounded schema
        beside = require_json_schema(schema, field, max_branches=self._limits.max_branches, on_fault=note)
        for place, inner in beside:
            walk.visit(inner, place)
        if not is_faulty:
            self._patterns_left = walk.patterns_left
        return _without(schema, walk.left_out, walk.flags) if walk.left_out or walk.flags else schema


class _Walk:
    """One pass over a schema and its subschemas."""

    def __init__(self, limits: SchemaLimits, patterns_left: int, on_fault: OnFault) -> None:
        self._limits = limits
        self._nodes_left = limits.max_nodes - 1
        self._enum_left = limits.max_enum
        self._on_fault = on_fault
        self.patterns_left = patterns_left
        self.left_out: dict[int, set[str | int]] = {}
        """Removed keywords by `id()` of their schema."""
        self.flags: dict[int, set[str | int]] = {}
        """Boolean schemas: names or indices by `id()` of their container."""

    def visit(self, schema: Mapping[str, Any], field: str, depth: int = 1) -> None:
        """Checks a schema and its subschemas."""
        for key, value in schema.items():
            place = f"{field}.{key}"
            try:
                if self._is_left_out(key, value, place, schema):
                    self.left_out.setdefault(id(schema), set()).add(key)
                elif key in _CHECKED:
                    self._look_at(key, value, place)
            except FieldError as error:
                message = error.message.removeprefix(f"{error.field}: ")
                self._on_fault(SchemaFault(field=error.field, message=message, holder=schema, keys=(key,)))
                continue
            if key in WITH_SCHEMAS:
                self._note_flags(key, value, schema)
                for inner_place, inner in inner_schemas(key, value):
                    inner_field = f"{place}{inner_place}"
                    if excess := self._excess(depth + 1):
                        self._on_fault(SchemaFault(field=inner_field, message=excess, holder=schema, keys=(key,)))
                        break
                    self.visit(inner, inner_field, depth + 1)

    def _excess(self, depth: int) -> str:
        """Counts one more schema. Returns the limit that it exceeds, as text; empty: none."""
        self._nodes_left -= 1
        if depth > self._limits.max_depth:
            return f"is nested deeper than {self._limits.max_depth} schemas"
        if self._nodes_left < 0:
            return f"is one too many: a schema holds at most {self._limits.max_nodes} schemas"
        return ""

    def _note_flags(self, key: str, value: object, schema: Mapping[str, Any]) -> None:
        holder: object = value
        flags: set[str | int] = set()
        if isinstance(value, bool):
            holder, flags = schema, set() if key in _FLAGS_STAY else {key}
        elif isinstance(value, Mapping) and key in MAP_KEYS:
            flags = {name for name, inner in value.items() if isinstance(inner, bool)}
        elif isinstance(value, list) and key in LIST_KEYS:
            flags = {index for index, inner in enumerate(value) if isinstance(inner, bool)}
        if flags:
            self.flags.setdefault(id(holder), set()).update(flags)

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
        """Whether to pass a pattern to the engine. Raises INVALID_ARGUMENT for an unsafe pattern without a `format`."""
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
    # JSON Schema counts 3.0 as an integer.
    return isinstance(value, int | float) and not isinstance(value, bool) and value == int(value)


def _repaired(schema: Mapping[str, Any], faults: Sequence[SchemaFault]) -> Any:
    """Returns a copy of a schema without the faulty parts."""
    left_out: dict[int, set[str | int]] = {}
    opened: dict[int, set[str | int]] = {}
    for fault in faults:
        (opened if fault.is_schema else left_out).setdefault(id(fault.holder), set()).update(fault.keys)
    return _without(schema, left_out, opened)


def _without(value: Any, left_out: Mapping[int, set[str | int]], opened: Mapping[int, set[str | int]]) -> Any:
    """Returns a copy of a schema without some keys or entries; those in `opened` become an object.

    The object allows nothing in place of `false`, and anything otherwise.
    """
    gone, changed = left_out.get(id(value), ()), opened.get(id(value), ())
    if isinstance(value, dict):
        return {
            key: _opened(inner) if key in changed else _without(inner, left_out, opened)
            for key, inner in value.items()
            if key not in gone
        }
    if isinstance(value, list):
        return [
            _opened(inner) if index in changed else _without(inner, left_out, opened)
            for index, inner in enumerate(value)
            if index not in gone
        ]
    return value


def _opened(value: object) -> dict[str, Any]:
    return {"not": {}} if value is False else {}


def require_safe_pattern(pattern: str, field: str) -> None:
    """Raises INVALID_ARGUMENT naming `field` unless a pattern can be matched in linear time and little memory."""
    try:
        compiled_pattern(pattern)
    except (re2.error, UnicodeEncodeError) as error:
        raise invalid_field(field, f"is not a pattern that is safe to run: {_words_of(error)}") from None
    if pattern_ways(pattern) > MAX_WAYS:
        words = f"it has more than {MAX_WAYS:,} ways to its next character; repeat no group that may be empty"
        raise invalid_field(field, f"is not a pattern that is safe to run: {words}")


def compiled_pattern(pattern: str) -> Any:
    """Returns a pattern of JavaScript for RE2, which matches in linear time. Raises re2.error, UnicodeEncodeError."""
    options = re2.Options()
    options.log_errors = False
    options.max_mem = _MAX_PATTERN_MEMORY
    return re2.compile(_CODE_POINT.sub(lambda found: f"\\x{{{found[1]}}}" if found[1] else found[0], pattern), options)


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
