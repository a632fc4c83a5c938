"""Validates tool arguments by JSON schema (draft 2020-12), in bounded time.

Schemas of MCP servers are untrusted. References outside the schema are rejected, never fetched. Regular expressions
(`pattern`, `patternProperties`) are shown to the model but not enforced, because Python's can take unbounded time;
neither are `unevaluatedProperties` and `unevaluatedItems`. The work of one check is bounded.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from weft.kernel.errors import FieldError, WeftError
from weft.kernel.json_schema import require_json_schema
from weft.kernel.reasons import Reason

MAX_SCHEMA_BYTES = 65_536
"""Maximum size of a tool's schema as JSON."""
MAX_SCHEMA_DEPTH = 64
"""Maximum nesting of objects and arrays in a schema."""
MAX_ARGUMENT_BYTES = 1_048_576
"""Maximum size of a call's arguments as JSON."""
MAX_CHECK_STEPS = 50_000
"""Maximum number of evaluated keywords in one check; more means references that multiply."""
MAX_CHECK_DEPTH = 128
"""Maximum nesting of evaluated keywords: arguments have at most 28 levels, which need 3 each."""
MAX_CHECK_CPU_SECONDS = 0.5
"""Maximum processor time of one check, which blocks the event loop: a step with a long `enum` is expensive."""
MAX_MESSAGE_CHARACTERS = 512
NOT_ENFORCED = ("pattern", "patternProperties", "unevaluatedProperties", "unevaluatedItems")
"""Keywords that are shown to the model but not enforced; see above."""
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
        self._validator: Any = None
        self._steps = self._depth = 0
        self._end = 0.0

    def parse(self, text: str) -> dict[str, Any]:
        """Returns the arguments. Raises TOOL_CALL_INVALID with the error, without repeating all arguments."""
        arguments = self._decode(text)
        validator = self._compiled()
        self._steps, self._depth, self._end = 0, 0, time.thread_time() + MAX_CHECK_CPU_SECONDS
        try:
            error = next(validator.iter_errors(arguments), None)
        except (RecursionError, _TooManyStepsError):
            raise self._invalid("they cannot be checked: the tool's schema takes too many steps") from None
        except Exception as problem:  # noqa: BLE001 - the schema is untrusted: unknown types, dangling references
            raise self._invalid(f"they cannot be checked: {type(problem).__name__} in the tool's schema") from None
        if error is not None:
            where = error.json_path.encode(errors="replace").decode()  # a key may contain a lone surrogate
            raise self._invalid(f"{where[:MAX_MESSAGE_CHARACTERS]}: {error.message[:MAX_MESSAGE_CHARACTERS]}")
        return arguments

    def _decode(self, text: str) -> dict[str, Any]:
        if len(text) > MAX_ARGUMENT_BYTES:
            raise self._invalid(f"they have more than {MAX_ARGUMENT_BYTES} bytes")
        try:
            arguments = json.loads(text.strip() or "{}", parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as problem:
            raise self._invalid(f"they are not JSON: {str(problem)[:MAX_MESSAGE_CHARACTERS]}") from None
        if not isinstance(arguments, dict):
            raise self._invalid("they are not a JSON object")
        return arguments

    def _compiled(self) -> Any:
        """Returns the validator, created on first use: a runner without tools saves the import."""
        if self._validator is None:
            import jsonschema  # noqa: PLC0415 - see above
            import referencing  # noqa: PLC0415 - a dependency of jsonschema

            base = jsonschema.Draft202012Validator
            keywords: dict[str, Callable[..., Any]] = {
                name: self._counted(function) for name, function in base.VALIDATORS.items() if name not in NOT_ENFORCED
            }
            keywords["additionalProperties"] = _without_patterns(keywords["additionalProperties"])
            keywords["uniqueItems"] = _unique
            checker = jsonschema.validators.create(meta_schema=base.META_SCHEMA, validators=keywords)
            self._validator = checker(dict(self.schema), registry=referencing.Registry())
        return self._validator

    def _counted(self, keyword: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
        def check(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
            self._steps += 1
            # Python's recursion limit must not be reached: the library's Rust parts panic there.
            if self._steps > MAX_CHECK_STEPS or self._depth >= MAX_CHECK_DEPTH or time.thread_time() > self._end:
                raise _TooManyStepsError
            self._depth += 1
            try:
                yield from keyword(validator, value, instance, schema) or ()
            finally:
                self._depth -= 1

        return check

    def _invalid(self, why: str) -> WeftError:
        message = f"the arguments for the tool {self.tool} are wrong: {why}"
        return WeftError(Reason.TOOL_CALL_INVALID, message, metadata={"tool": self.tool})


class _TooManyStepsError(Exception):
    """A schema whose references multiply."""


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON value")


def _without_patterns(keyword: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Skips `additionalProperties` if there are patterns, which would define what is additional."""

    def check(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if "patternProperties" not in schema:
            yield from keyword(validator, value, instance, schema)

    return check


def _unique(validator: Any, value: Any, instance: Any, _schema: Any) -> Iterator[Any]:
    """Checks `uniqueItems` in one pass; the library compares all pairs."""
    import jsonschema  # noqa: PLC0415 - see above

    if value and validator.is_type(instance, "array"):
        distinct = {json.dumps(item, sort_keys=True) for item in instance}
        if len(distinct) < len(instance):
            yield jsonschema.ValidationError("the items are not all different")
