"""Validation of JSON schemas of any draft.

Engines compile schemas to grammars without checking them: a `required` that is not a list, a dangling reference or a
definition that only refers to itself makes the engine fail or crash. A metaschema checks the keywords; references are
checked here, because the library reports no location for a dangling one.

Bounds that no value satisfies are also rejected: llama.cpp writes out a repetition from its lower to its upper bound,
and a `minLength` above the `maxLength` makes it allocate all memory. `allOf` and references are merged with the
schema beside them; alternatives contradict it if all of them do.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeGuard
from urllib.parse import unquote

from annotated_types import Ge, Le

from weft.kernel.errors.error_tree import invalid_field

if TYPE_CHECKING:
    import jsonschema_rs

_Count = Annotated[int, Ge(1), Le(10_000_000)]
_Bytes = Annotated[int, Ge(1024), Le(1_073_741_824)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaLimits:
    """Limits of the JSON schemas of one request: tools and answer format. The error 400 names the place.

    Engines make grammars of them, in time and memory that grow faster than the schema.
    """

    max_bytes: _Bytes = 64 * 1024
    """Maximum size of one schema as JSON."""
    max_total_bytes: _Bytes = 1024 * 1024
    """Maximum total size."""
    max_depth: Annotated[int, Ge(1), Le(128)] = 32
    """Maximum nesting of schemas."""
    max_nodes: _Count = 2000
    """Maximum number of schemas within one, including itself."""
    max_enum: _Count = 1000
    """Maximum number of values in all its enums together."""
    max_repeat: _Count = 100_000
    """Maximum value of `minItems`, `minLength` and similar: a grammar is expanded that often. Upper bounds above it
    (`maxLength`) are left out."""
    max_branches: _Count = 1024
    """Maximum number of combinations of `anyOf`, `oneOf` and `allOf`."""
    max_pattern_chars: Annotated[int, Ge(1), Le(65_536)] = 512
    """Maximum length of a pattern."""
    max_patterns: Annotated[int, Ge(1), Le(10_000)] = 256
    """Maximum number of patterns in all schemas together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaFault:
    """A fault in a schema, and the part to remove to repair it."""

    field: str
    """Path of the fault."""
    message: str
    holder: Mapping[str, Any] | list[Any]
    """The object or list that contains the part."""
    keys: tuple[str | int, ...]
    """The part's keys or index in `holder`."""
    is_schema: bool = False
    """Whether the part must be a schema: instead of removing it, replace it by one without keywords."""


OnFault = Callable[[SchemaFault], None]
"""Called with each fault. Raising ends the check."""


def refuse_fault(fault: SchemaFault) -> None:
    """Raises INVALID_ARGUMENT for a fault."""
    raise invalid_field(fault.field, fault.message)


SCHEMA_TYPES: Final = ("array", "boolean", "integer", "null", "number", "object", "string")
SCHEMA_KEYS: Final = (
    "additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not",
    "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
LIST_KEYS: Final = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
MAP_KEYS: Final = ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")
COUNT_KEYS: Final = (
    "maxContains", "maxItems", "maxLength", "maxProperties", "minContains", "minItems", "minLength", "minProperties",
)  # fmt: skip
REFERENCE_KEYS: Final = ("$ref", "$dynamicRef", "$recursiveRef")
WITH_SCHEMAS: Final = frozenset({*SCHEMA_KEYS, *LIST_KEYS, *MAP_KEYS})
SHOWN_CHARS: Final = 64
"""Maximum characters of a property name in the path of an error."""

_MAX_REFERENCES_IN_A_ROW: Final = 64
_MAX_INDEX_DIGITS: Final = 6
_ALTERNATIVES: Final = ("anyOf", "oneOf")
_IN_PLACE_KEYS: Final = ("not", "if", "then", "else")
_IN_PLACE_MAPS: Final = ("dependentSchemas", "dependencies")
_IN_PLACE: Final = frozenset({*_ALTERNATIVES, "allOf", *_IN_PLACE_KEYS, *_IN_PLACE_MAPS, *REFERENCE_KEYS})
"""Keywords with schemas that apply to the same value as the schema itself."""
_ANCHORS: Final = ("$anchor", "$dynamicAnchor")
_TEXT_KEYS: Final = ("$anchor", "$dynamicAnchor", "$id", "$schema", "description", "format", "pattern", "title")
_FLAG_KEYS: Final = ("deprecated", "readOnly", "uniqueItems", "writeOnly")

_SCHEMA: Final = {"$ref": "#"}
_SCHEMA_MAP: Final = {"type": "object", "additionalProperties": _SCHEMA}
_COUNT: Final = {"type": "integer", "minimum": 0}
_TEXT: Final = {"type": "string"}
_FLAG: Final = {"type": "boolean"}
_SCHEMAS: Final = {"type": "array", "minItems": 1, "items": _SCHEMA}
_NAMES: Final = {"type": "array", "items": _TEXT}
_METASCHEMA: Final[dict[str, Any]] = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": ["object", "boolean"],
    "properties": {
        **dict.fromkeys(SCHEMA_KEYS, _SCHEMA),
        **dict.fromkeys(LIST_KEYS, _SCHEMAS),
        **dict.fromkeys(MAP_KEYS, _SCHEMA_MAP),
        **dict.fromkeys(COUNT_KEYS, _COUNT),
        "minimum": {"type": "number"},
        "maximum": {"type": "number"},
        # A number since draft 06; in older drafts and OpenAPI 3.0, a flag for the other bound.
        "exclusiveMinimum": {"type": ["number", "boolean"]},
        "exclusiveMaximum": {"type": ["number", "boolean"]},
        **dict.fromkeys((*_TEXT_KEYS, *REFERENCE_KEYS), _TEXT),
        **dict.fromkeys(_FLAG_KEYS, _FLAG),
        # One schema or, until 2019-09, a list of them.
        "items": {"if": {"type": "array"}, "then": _SCHEMAS, "else": _SCHEMA},
        # Names or, until draft 07, a schema.
        "dependencies": {
            "type": "object",
            "additionalProperties": {"if": {"type": "array"}, "then": _NAMES, "else": _SCHEMA},
        },
        "dependentRequired": {"type": "object", "additionalProperties": _NAMES},
        "enum": {"type": "array", "minItems": 1},
        "multipleOf": {"type": "number", "exclusiveMinimum": 0},
        "required": _NAMES,
        "type": {
            "anyOf": [
                {"enum": list(SCHEMA_TYPES)},
                {"type": "array", "minItems": 1, "items": {"enum": list(SCHEMA_TYPES)}},
            ]
        },
    },
}
"""Keywords of all drafts from 04 to 2020-12, because few clients specify their draft.

Duplicates in `required` and `type` are allowed, since every engine accepts them.
"""
_NEW_WORDS: Final = {
    "items": _SCHEMA,
    "exclusiveMinimum": {"type": "number"},
    "exclusiveMaximum": {"type": "number"},
}
"""Keywords whose form in 2020-12 differs from older drafts."""


def require_json_schema(
    schema: Mapping[str, Any],
    field: str,
    *,
    max_branches: int | None = None,
    has_old_words: bool = True,
    on_fault: OnFault = refuse_fault,
) -> list[tuple[str, Mapping[str, Any]]]:
    """Returns the schemas, with their paths, that references point to outside the keywords for schemas.

    `schema` has a bounded depth and size. `max_branches` limits the combinations of anyOf, oneOf and allOf; None: no
    limit. `has_old_words` allows the keyword forms of drafts before 2020-12. `on_fault` gets each fault; by default it
    raises INVALID_ARGUMENT naming the keyword below `field`. References are only followed if all keywords are valid.
    """
    keywords = _metaschema(has_old_words)
    if not _has_right_keywords(schema, field, keywords, on_fault):
        return []
    references = _References(schema, field, keywords, max_branches, on_fault)
    references.require_progress()
    return references.beside


def inner_schemas(key: str, value: object) -> list[tuple[str, Mapping[str, Any]]]:
    """Returns the schemas below a keyword, with their paths from it."""
    if isinstance(value, dict):
        if key not in MAP_KEYS:
            return [("", value)]
        return [(f".{name[:SHOWN_CHARS]}", inner) for name, inner in value.items() if isinstance(inner, dict)]
    if isinstance(value, list) and key in LIST_KEYS:
        return [(f"[{index}]", inner) for index, inner in enumerate(value) if isinstance(inner, dict)]
    return []


@lru_cache(maxsize=2)
def _metaschema(has_old_words: bool) -> "jsonschema_rs.Draft7Validator":
    import jsonschema_rs  # noqa: PLC0415 - 30 ms that only a process that meets a schema spends

    if has_old_words:
        return jsonschema_rs.Draft7Validator(_METASCHEMA)
    return jsonschema_rs.Draft7Validator({**_METASCHEMA, "properties": {**_METASCHEMA["properties"], **_NEW_WORDS}})


def _has_right_keywords(
    schema: Mapping[str, Any], field: str, keywords: "jsonschema_rs.Draft7Validator", on_fault: OnFault
) -> bool:
    if keywords.is_valid(schema):
        return True
    for error in keywords.iter_errors(schema):
        steps = (f"[{step}]" if isinstance(step, int) else f".{step[:SHOWN_CHARS]}" for step in error.instance_path)
        place = field + "".join(steps)
        on_fault(_fault_at(schema, error.instance_path, place, _words(error.kind.name, error.kind.as_dict())))
    return False


def _fault_at(schema: Any, path: Sequence[str | int], field: str, message: str) -> SchemaFault:
    """Returns the fault at a path of the schema; its part is a keyword, or an entry that is not a schema."""
    holder = value = schema
    key: str | int = ""
    place = _Place.SCHEMA
    for step in path:
        if place is _Place.OTHER:
            break
        holder, key, value = value, step, value[step]
        place = _place_of(key, value) if place is _Place.SCHEMA else _Place.SCHEMA
    is_schema = place is _Place.SCHEMA
    return SchemaFault(field=field, message=message, holder=holder, keys=(key,), is_schema=is_schema)


class _Place(Enum):
    SCHEMA, SCHEMAS, OTHER = range(3)


def _place_of(key: str | int, value: object) -> _Place:
    if key in MAP_KEYS or (key in LIST_KEYS and isinstance(value, list)):
        return _Place.SCHEMAS
    return _Place.SCHEMA if key in SCHEMA_KEYS else _Place.OTHER


def _words(keyword: str, details: Mapping[str, Any]) -> str:
    match keyword:
        case "type":
            return f"must be of the JSON type {' or '.join(sorted(details['types']))}"
        case "minItems":
            return "must not be empty"
        case "minimum":
            return f"must be at least {details['limit']}"
        case "exclusiveMinimum":
            return f"must be above {details['limit']}"
        case _:  # the only alternative is that of `type`
            return f"must be one or more of {', '.join(SCHEMA_TYPES)}"


class _References:
    """The references of a schema: their targets, and whether following them ends.

    Properties and items do not multiply the branches, since each has a separate rule in a grammar.
    """

    def __init__(
        self,
        root: Mapping[str, Any],
        field: str,
        keywords: "jsonschema_rs.Draft7Validator",
        most_branches: int | None,
        on_fault: OnFault,
    ) -> None:
        self._root = root
        self._field = field
        self._keywords = keywords
        self._most = most_branches
        self._on_fault = on_fault
        self.beside: list[tuple[str, Mapping[str, Any]]] = []
        self._places: dict[int, str] = {}
        self._resources: dict[int, Mapping[str, Any]] = {}
        """The nearest enclosing schema with an `$id`, by `id()` of a schema: references are relative to it."""
        self._anchors: dict[str, Mapping[str, Any]] = {}
        self._known: dict[int, int] = {}
        self._open: set[int] = set()

    def require_progress(self) -> None:
        """Reports dangling and endless references, too many branches, and contradictory bounds."""
        schemas = list(self._collect(self._root, self._field, self._root))
        for schema in schemas:  # grows while it is walked
            for key in schema.keys() & frozenset(REFERENCE_KEYS):
                schemas += self._follow(schema, key)
        for schema in schemas:
            self._count(schema)
        for schema in schemas:
            self._require_possible(schema)

    def _collect(
        self, schema: Mapping[str, Any], place: str, resource: Mapping[str, Any]
    ) -> Iterator[Mapping[str, Any]]:
        identity = schema.get("$id", schema.get("id"))
        if isinstance(identity, str) and identity.startswith("#"):
            self._anchors[identity[1:]] = schema
        elif isinstance(schema.get("$id"), str):
            resource = schema
        for key in _ANCHORS:
            if key in schema:
                self._anchors[schema[key]] = schema
        self._places[id(schema)] = place
        self._resources[id(schema)] = resource
        yield schema
        for key in schema:
            if key in WITH_SCHEMAS:
                for inner_place, inner in inner_schemas(key, schema[key]):
                    yield from self._collect(inner, f"{place}.{key}{inner_place}", resource)

    def _follow(self, schema: Mapping[str, Any], key: str) -> Iterator[Mapping[str, Any]]:
        """Yields the schemas at a reference's target unless a keyword for schemas has already led there."""
        target = self._target(schema, key)
        if target is None:
            self._refuse(schema, "refers to a place that this schema does not have", key)
            return
        if isinstance(target, bool) or id(target) in self._places:
            return
        place = self._field + schema[key].removeprefix("#").replace("/", ".")[:SHOWN_CHARS]
        if not _has_right_keywords(target, place, self._keywords, self._on_fault):
            return
        self.beside.append((place, target))
        yield from self._collect(target, place, self._root)

    def _target(self, schema: Mapping[str, Any], key: str) -> Mapping[str, Any] | bool | None:
        """Returns the target of a reference; None if it is not a schema."""
        pointer = unquote(schema[key])
        for resource in (self._resources[id(schema)], self._root):
            if pointer == "#" or pointer.startswith("#/"):
                found = _at(resource, pointer)
            else:
                found = self._anchors.get(pointer.removeprefix("#"))
            if isinstance(found, Mapping | bool):
                return found
        return None

    def _count(self, schema: Mapping[str, Any]) -> int:
        """Returns the number of combinations of a schema's alternatives, following references."""
        known = self._known.get(id(schema))
        if known is not None:
            return known
        if id(schema) in self._open:
            self._refuse(schema, "must not refer to itself")
            return 1
        if not schema.keys() & _IN_PLACE:
            return 1
        if len(self._open) == _MAX_REFERENCES_IN_A_ROW:
            self._refuse(schema, f"must not lead through more than {_MAX_REFERENCES_IN_A_ROW} references in a row")
            return 1
        self._open.add(id(schema))
        count = self._combined(schema)
        if self._most is not None and count > self._most:
            self._refuse(schema, f"has more than {self._most} combinations of anyOf, oneOf and allOf")
            count = 1
        self._open.remove(id(schema))
        self._known[id(schema)] = count
        return count

    def _require_possible(self, schema: Mapping[str, Any]) -> None:
        found = contradiction(schema, self._referred)
        if found is None:
            return
        low, high = found
        own = [key for key in schema if key in {low, high, f"exclusiveM{low[1:]}", f"exclusiveM{high[1:]}"}]
        place = self._places[id(schema)] + (f".{own[0]}" if own else "")
        keys = tuple(own or schema.keys() & _IN_PLACE)
        what = "the alternatives and the bounds beside them" if low in _ALTERNATIVES else f"{low} and {high}"
        message = f"leaves no value: {what} contradict each other; correct or remove one of them"
        self._on_fault(SchemaFault(field=place, message=message, holder=schema, keys=keys))

    def _referred(self, schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Returns the target of a schema's reference; None if it has none."""
        for key in REFERENCE_KEYS:
            target = self._target(schema, key) if key in schema else None
            if isinstance(target, Mapping):
                return target
        return None

    def _combined(self, schema: Mapping[str, Any]) -> int:
        count = 1
        for key in _ALTERNATIVES:
            if key in schema:
                count *= sum(self._count(inner) for _, inner in inner_schemas(key, schema[key])) or 1
        for _, inner in inner_schemas("allOf", schema.get("allOf")):
            count *= self._count(inner)
        if (target := self._referred(schema)) is not None:
            count *= self._count(target)
        for key in (*_IN_PLACE_KEYS, *_IN_PLACE_MAPS):
            for _, inner in inner_schemas(key, schema.get(key)):
                self._count(inner)
        return count

    def _refuse(self, schema: Mapping[str, Any], message: str, key: str = "") -> None:
        """Reports a fault of one keyword, or of all keywords that apply to the value itself."""
        place = self._places[id(schema)]
        field, keys = (f"{place}.{key}", (key,)) if key else (place, tuple(schema.keys() & _IN_PLACE))
        self._on_fault(SchemaFault(field=field, message=message, holder=schema, keys=keys))


def _at(root: object, pointer: str) -> object:
    found = root
    for step in pointer.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(name)
        elif isinstance(found, list) and name.isascii() and name.isdigit() and len(name) <= _MAX_INDEX_DIGITS:
            found = found[int(name)] if int(name) < len(found) else None
        else:
            return None
    return found


PAIRS: Final = (
    ("minLength", "maxLength"),
    ("minItems", "maxItems"),
    ("minProperties", "maxProperties"),
    ("minContains", "maxContains"),
    ("minimum", "maximum"),
)
"""Lower and upper bounds of one quantity."""
_OTHER_BOUND: Final = MappingProxyType({"minimum": "exclusiveMinimum", "maximum": "exclusiveMaximum"})

Bound = tuple[float, bool]
"""A value, and whether it is exclusive."""
Target = Callable[[Mapping[str, Any]], Mapping[str, Any] | None]


def contradiction(schema: Mapping[str, Any], target: Target) -> tuple[str, str] | None:
    """Returns the names of two bounds that no value satisfies, or None. The references of `schema` must end."""
    found = _Bounds()
    found.add(schema, target)
    return found.contradiction()


class _Bounds:
    """The combined bounds of schemas that apply to one value."""

    def __init__(self, around: "_Bounds | None" = None) -> None:
        """Starts with the bounds of `around`; alternatives within alternatives are then not followed."""
        self._bounds: dict[str, Bound] = {} if around is None else dict(around._bounds)  # noqa: SLF001 - of this class
        self._is_whole: bool = around is not None and around._is_whole  # noqa: SLF001 - of this class
        self._is_way = around is not None
        self._has_no_way = False
        self._seen: set[int] = set()

    def add(self, schema: Mapping[str, Any], target: Target) -> None:
        """Adds a schema and all that apply to the same value."""
        if id(schema) in self._seen:
            return
        self._seen.add(id(schema))
        self._is_whole = self._is_whole or schema.get("type") == "integer"
        for low, high in PAIRS:
            self._narrow(low, _bound(schema, low), max)
            self._narrow(high, _bound(schema, high), min)
        beside = [*_schemas(schema.get("allOf")), target(schema)]
        for inner in beside:
            if inner is not None:
                self.add(inner, target)
        for key in () if self._is_way else _ALTERNATIVES:
            ways = _schemas(schema.get(key))
            if ways and self._bounds and all(self._with(way, target).contradiction() for way in ways):
                self._has_no_way = True

    def contradiction(self) -> tuple[str, str] | None:
        """Returns the names of two bounds without a value between them, or None."""
        for low, high in PAIRS:
            if low in self._bounds and high in self._bounds and self._is_empty(low, high):
                return low, high
        return _ALTERNATIVES if self._has_no_way else None

    def _with(self, schema: Mapping[str, Any], target: Target) -> "_Bounds":
        both = _Bounds(self)
        both.add(schema, target)
        return both

    def _narrow(self, name: str, bound: Bound | None, choose: Callable[[float, float], float]) -> None:
        if bound is None:
            return
        old = self._bounds.get(name)
        if old is None or (old[0] == bound[0] and bound[1]) or choose(old[0], bound[0]) != old[0]:
            self._bounds[name] = bound

    def _is_empty(self, low_name: str, high_name: str) -> bool:
        (low, is_above), (high, is_below) = self._bounds[low_name], self._bounds[high_name]
        if self._is_whole and low_name == "minimum":
            first = math.floor(low) + 1 if is_above else math.ceil(low)
            last = math.ceil(high) - 1 if is_below else math.floor(high)
            return first > last
        return low > high or (low == high and (is_above or is_below))


def _bound(schema: Mapping[str, Any], name: str) -> Bound | None:
    value, other = schema.get(name), schema.get(_OTHER_BOUND.get(name, ""))
    found = (value, other is True) if _is_number(value) else None
    if not _is_number(other):
        return found
    is_narrower = found is None or (other >= found[0] if name == "minimum" else other <= found[0])
    return (other, True) if is_narrower else found


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and value not in (math.inf, -math.inf)


def _schemas(value: object) -> Sequence[Mapping[str, Any]]:
    return [inner for inner in value if isinstance(inner, Mapping)] if isinstance(value, list) else ()
