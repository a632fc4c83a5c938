"""Checks values by JSON schemas, in bounded time.

Schemas of callers and MCP servers are untrusted. References outside the schema are never fetched, RE2 matches patterns
in linear time, and the processor time of one check is limited. Keywords have the meaning of draft 2020-12 or, in forms
that only older drafts have, of those.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from decimal import Decimal, InvalidOperation
from typing import Any, NoReturn

from weft.kernel.schemas.schema_guard import compiled_pattern

MAX_CHECK_DEPTH = 128
"""Maximum nesting of evaluated keywords, below Python's recursion limit: a message has at most 28 levels, which need 3
each."""
MAX_PROBLEM_CHARS = 300
_UNCHECKED = ("unevaluatedItems", "unevaluatedProperties", "$recursiveRef")
_TOO_MUCH = "the schema takes too many steps"
_FORMATS = ("date", "email", "ipv4", "ipv6", "uuid")
"""Values of `format` that are checked, besides `date-time`; all others are annotations."""
_OF_DRAFT_7 = ("additionalItems", "dependencies")


class UncheckedError(Exception):
    """A value that could not be checked; the text says why."""


def parsed(text: str) -> Any:
    """Returns a JSON text as a value. Raises ValueError for another text, RecursionError for one that is too deep."""
    return json.loads(text, parse_constant=_refuse_constant)


def matches(pattern: str, text: str) -> bool:
    """Whether the whole text matches a pattern. Raises UncheckedError for a pattern that RE2 cannot match."""
    return _pattern(pattern).fullmatch(text) is not None


def _pattern(pattern: str) -> Any:
    try:
        return compiled_pattern(pattern)
    except Exception as error:
        raise UncheckedError(f"the pattern {pattern[:64]!r} is not one that is safe to run") from error


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON value")


class ValueCheck:
    """The validator of values by one schema."""

    def __init__(self, schema: Mapping[str, Any], *, max_cpu_seconds: float, is_lenient: bool = False) -> None:
        """`is_lenient`: what cannot be checked of a schema is not enforced, instead of raising UncheckedError."""
        self._schema = schema
        self._max_cpu_seconds = max_cpu_seconds
        self._is_lenient = is_lenient
        self._validator: Any = None
        self._depth = 0
        self._end = 0.0
        self._patterns: dict[str, Any] = {}

    def _compiled(self) -> Any:
        """Returns the validator, created on first use: a runner without schemas saves the import."""
        import jsonschema  # noqa: PLC0415 - see above
        import referencing  # noqa: PLC0415 - a dependency of jsonschema

        new, old = jsonschema.Draft202012Validator.VALIDATORS, jsonschema.Draft7Validator.VALIDATORS
        keywords: dict[str, Any] = {**new, **{name: old[name] for name in _OF_DRAFT_7}}
        keywords |= dict.fromkeys(_UNCHECKED, self._check_nothing)
        keywords |= {
            "items": _either(list, old["items"], new["items"]),
            "pattern": self._check_pattern,
            "patternProperties": self._check_named,
            "additionalProperties": self._check_others,
            "uniqueItems": _check_unique,
            "multipleOf": _check_multiple,
        }
        for name, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            # In draft 4 it is a flag for the other bound.
            of_draft_4 = jsonschema.Draft4Validator.VALIDATORS[bound]
            keywords[name] = _either(bool, lambda *_: (), new[name])
            keywords[bound] = _beside_flag(name, of_draft_4, new[bound])
        counted = {name: self._counted(function) for name, function in keywords.items()}
        meta = jsonschema.Draft202012Validator.META_SCHEMA
        made = jsonschema.validators.create(meta_schema=meta, validators=counted)
        formats = None if self._is_lenient else jsonschema.FormatChecker(_FORMATS)
        if formats is not None:
            formats.checks("date-time", ValueError)(_is_date_time)
        return made(dict(self._schema), registry=referencing.Registry(), format_checker=formats)

    def problem(self, value: Any) -> str:
        """Returns where and why a value breaks the schema; empty: it does not. Raises UncheckedError."""
        try:
            if self._validator is None:
                self._validator = self._compiled()
            # Not counted: the import, which may take longer than the limit.
            self._depth, self._end = 0, time.thread_time() + self._max_cpu_seconds
            error = next(self._validator.iter_errors(value), None)
        except UncheckedError:
            raise
        except RecursionError:
            raise UncheckedError(_TOO_MUCH) from None
        except Exception as fault:  # noqa: BLE001 - the schema is untrusted: unknown types, dangling references
            raise UncheckedError(f"{type(fault).__name__} in the schema") from None
        if error is None:
            return ""
        where = error.json_path.encode(errors="replace").decode()  # a key may contain a lone surrogate
        words = error.message.encode(errors="replace").decode()
        return f"{where[:MAX_PROBLEM_CHARS]}: {words[:MAX_PROBLEM_CHARS]}"

    def _counted(self, keyword: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
        def check(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
            # Python's recursion limit must not be reached: the library's Rust parts panic there.
            if self._depth >= MAX_CHECK_DEPTH:
                raise UncheckedError(_TOO_MUCH)
            self._require_time()
            self._depth += 1
            try:
                yield from keyword(validator, value, instance, schema) or ()
            finally:
                self._depth -= 1

        return check

    def _require_time(self) -> None:
        if time.thread_time() > self._end:
            raise UncheckedError(_TOO_MUCH)

    def _search(self, pattern: str, text: str) -> bool | None:
        """Whether a text has a pattern; None: it is not enforced."""
        self._require_time()
        if pattern not in self._patterns:
            try:
                self._patterns[pattern] = _pattern(pattern)
            except UncheckedError:
                if not self._is_lenient:
                    raise
                self._patterns[pattern] = None
        found = self._patterns[pattern]
        return None if found is None else found.search(text) is not None

    def _check_nothing(self, *_: Any) -> tuple[()]:
        if not self._is_lenient:
            raise UncheckedError(f"the schema has one of {', '.join(_UNCHECKED)}")
        return ()

    def _check_pattern(self, _validator: Any, pattern: str, instance: Any, _schema: Any) -> Iterator[Any]:
        if isinstance(instance, str) and self._search(pattern, instance) is False:
            yield _error(f"{instance[:MAX_PROBLEM_CHARS]!r} does not match {pattern!r}")

    def _check_named(self, validator: Any, schemas: Mapping[str, Any], instance: Any, _schema: Any) -> Iterator[Any]:
        for pattern, schema in schemas.items() if isinstance(instance, dict) else ():
            for name, value in instance.items():
                if self._search(pattern, name):
                    yield from validator.descend(value, schema, path=name, schema_path=pattern)

    def _check_others(self, validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[Any]:
        known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        for name, value in instance.items() if isinstance(instance, dict) else ():
            if name in known or any(self._search(pattern, name) is not False for pattern in patterns):
                continue
            if wanted is False:
                yield _error(f"Additional properties are not allowed ({name[:64]!r} was unexpected)")
            else:
                yield from validator.descend(value, wanted, path=name)


def _error(words: str) -> Any:
    import jsonschema  # noqa: PLC0415 - see above

    return jsonschema.ValidationError(words)


def _check_unique(_validator: Any, wanted: Any, instance: Any, _schema: Any) -> Iterator[Any]:
    """Checks `uniqueItems` in one pass; the library compares all pairs."""
    if wanted and isinstance(instance, list):
        distinct = {json.dumps(item, sort_keys=True) for item in instance}
        if len(distinct) < len(instance):
            yield _error("the items are not all different")


def _check_multiple(_validator: Any, step: Any, instance: Any, _schema: Any) -> Iterator[Any]:
    """Checks `multipleOf` with decimals: as floats, 0.3 is no multiple of 0.1."""
    if isinstance(instance, bool) or not isinstance(instance, int | float):
        return
    try:
        rest = Decimal(repr(instance)) % Decimal(repr(step))
    except InvalidOperation:
        raise UncheckedError("a number is too large for multipleOf") from None
    if rest:
        yield _error(f"{instance!r} is not a multiple of {step!r}")


def _is_date_time(value: object) -> bool:
    return not isinstance(value, str) or datetime.fromisoformat(value.upper()).tzinfo is not None


def _either(kind: type, old: Callable[..., Any], new: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a keyword that is `old` for values of a type, and otherwise `new`."""
    return lambda *given: (old if isinstance(given[1], kind) else new)(*given)


def _beside_flag(flag: str, old: Callable[..., Any], new: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a keyword that is `old` beside a true flag, and otherwise `new`."""
    return lambda *given: (old if given[3].get(flag) is True else new)(*given)
