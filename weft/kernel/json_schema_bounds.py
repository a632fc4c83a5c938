"""Bounds of JSON schemas that no value can satisfy, such as a `minLength` above the `maxLength`.

llama.cpp writes a repetition out from its lower to its upper bound: with the two exchanged it allocates memory until
none is left. `allOf` and references are merged with the schema beside them; alternatives contradict it if all of them
do.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeGuard

PAIRS: Final = (
    ("minLength", "maxLength"),
    ("minItems", "maxItems"),
    ("minProperties", "maxProperties"),
    ("minContains", "maxContains"),
    ("minimum", "maximum"),
)
"""Lower and upper bounds of one quantity."""
_OTHER_BOUND: Final = MappingProxyType({"minimum": "exclusiveMinimum", "maximum": "exclusiveMaximum"})
_ALTERNATIVES: Final = ("anyOf", "oneOf")

Bound = tuple[float, bool]
"""A value, and whether it is itself outside."""
Target = Callable[[Mapping[str, Any]], Mapping[str, Any] | None]
"""Returns the schema to which the reference of a schema leads; None: it has none."""


def contradiction(schema: Mapping[str, Any], target: Target) -> tuple[str, str] | None:
    """Returns the names of the bounds that no value satisfies; None: there are none.

    The references of `schema` end, and its bounds are numbers.
    """
    found = _Bounds()
    found.add(schema, target)
    return found.contradiction()


class _Bounds:
    """The bounds of schemas that all apply to one value."""

    def __init__(self, around: "_Bounds | None" = None) -> None:
        """With `around`, its bounds apply too; alternatives within alternatives are not followed."""
        self._bounds: dict[str, Bound] = {} if around is None else dict(around._bounds)  # noqa: SLF001 - of this class
        self._is_whole: bool = around is not None and around._is_whole  # noqa: SLF001 - of this class
        self._is_way = around is not None
        self._has_no_way = False
        self._seen: set[int] = set()

    def add(self, schema: Mapping[str, Any], target: Target) -> None:
        """Add a schema, with those that apply to the same value."""
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
        """Returns the names of two bounds without a value between them; None: there are none."""
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
