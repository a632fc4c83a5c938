"""Whether a JSON schema is one: every known keyword holds what it must, and nothing refers to what is not there.

Engines turn schemas into grammars with code that trusts them, so that a stranger's nonsense must not get there. The
library's own check against the metaschema takes a second for a schema of 64 KiB; this walk takes milliseconds.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMAS = (
    *("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
_LISTS_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COUNTS = (
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    *("minContains", "maxContains"),
)
_TEXTS = ("description", "title", "pattern", "format", "$ref", "$dynamicRef", "$anchor", "$id", "$schema")
_FLAGS = ("uniqueItems", "deprecated", "readOnly", "writeOnly")


def require_sound(schema: Mapping[str, Any]) -> None:
    """Raise ValueError naming the keyword that is wrong. The schema's depth must be bounded already."""
    for part in _parts(schema):
        if isinstance(part, bool):
            continue
        if not isinstance(part, Mapping):
            raise ValueError("its schema holds something that is no schema")  # noqa: TRY004 - a value, not a type, is wrong
        for keyword, fits in _CHECKS.items():
            if keyword in part and not fits(part[keyword]):
                raise ValueError(f"its schema has a `{keyword}` that makes no sense")
        target = part.get("$ref", "#")
        if target.startswith("#/") and not _is_there(schema, target):
            raise ValueError("its schema refers to a part that it does not have")


def _parts(schema: Any) -> Iterator[Any]:
    """Every subschema, each parent before its children: the caller has then checked what the children hang on."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        yield part
        if not isinstance(part, Mapping):
            continue
        waiting.extend(part[keyword] for keyword in _SCHEMAS if keyword in part)
        for keyword in _LISTS_OF_SCHEMAS:
            waiting.extend(part.get(keyword, ()))
        for keyword in _MAPS_OF_SCHEMAS:
            waiting.extend(part.get(keyword, {}).values())


def _is_there(schema: Any, pointer: str) -> bool:
    part = schema
    for step in pointer.removeprefix("#/").split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, Mapping) and name in part:
            part = part[name]
        elif isinstance(part, list) and name.isascii() and name.isdigit() and int(name[:6]) < len(part):
            part = part[int(name[:6])]
        else:
            return False
    return isinstance(part, Mapping | bool)


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in _TYPES for name in names)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and (isinstance(value, int) or value.is_integer())


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    "type": _is_type,
    "required": _is_list_of_texts,
    "enum": lambda value: isinstance(value, list) and bool(value),
    **dict.fromkeys(_MAPS_OF_SCHEMAS, lambda value: isinstance(value, Mapping)),
    **dict.fromkeys(_LISTS_OF_SCHEMAS, lambda value: isinstance(value, list) and bool(value)),
    **dict.fromkeys(_NUMBERS, _is_number),
    **dict.fromkeys(_COUNTS, _is_count),
    **dict.fromkeys(_TEXTS, lambda value: isinstance(value, str)),
    **dict.fromkeys(_FLAGS, lambda value: isinstance(value, bool)),
}
