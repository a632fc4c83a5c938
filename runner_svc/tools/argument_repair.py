"""Repairs arguments of tool calls that are no JSON object, as small models write them."""

import ast
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from runner_svc.tools.schemas import ArgumentCheck
from weft.kernel.errors.error_tree import WeftError

MAX_REPAIRED_CHARS = 16_384
"""Maximum length of arguments that are repaired: the repair takes about 25 µs per character."""
_NAMES = ("name", "function", "tool", "tool_name")
_ARGUMENTS = ("arguments", "parameters", "args", "input")
_EMPTY_STRING = re.compile(r"\"\s*\"|'\s*'")
_EMPTY_VALUE = re.compile(r'(?<!\\)""')


def is_object(text: str) -> bool:
    """Whether a text is one JSON object."""
    try:
        return isinstance(json.loads(text, parse_constant=_refuse_constant), dict)
    except RecursionError:
        # Nested too deeply to tell, so it is left alone.
        return True
    except ValueError:
        return False


def repaired_arguments(check: ArgumentCheck, text: str, passed: str = "") -> str | None:
    """Returns the JSON object that a text was meant to be; None: it cannot be told, or does not match the schema.

    Nothing is made up: the text must not end within a string, hold two different objects, or lose a value.
    `passed`: the start of the text that the caller has received, which the result begins with.
    """
    if len(text) > MAX_REPAIRED_CHARS or _ends_within_string(text) or _are_different(_objects(text)):
        return None
    start = text.lstrip()
    for form in (text, *(["{" + text + "}"] if start[:1] in ("'", '"') else [])):
        for value in _readings(_loaded(form), check.tool):
            found = _written(value, passed)
            if found is not None and _is_likely(value, text, check) and _matches(check, found):
                return found
    return None


def _loaded(text: str) -> Any:
    """Returns a text as data: exactly if only its line breaks or its quotes are wrong, else as json-repair guesses."""
    import json_repair  # noqa: PLC0415 - needed for broken calls alone

    with suppress(RecursionError, ValueError):
        return json.loads(text, strict=False, parse_constant=_refuse_constant)
    if text.lstrip().startswith("{'") and "\\" not in text:
        with suppress(RecursionError, MemoryError, SyntaxError, TypeError, ValueError):
            return ast.literal_eval(text.strip())
    with suppress(RecursionError, ValueError):
        return json_repair.loads(text, skip_json_loads=True)
    return None


def _readings(found: Any, tool: str) -> Iterator[dict[str, Any]]:
    """Yields the objects that may be the arguments: in a string, alone in a list, or within a call of the tool."""
    if isinstance(found, str):
        found = _loaded(found)
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    if not isinstance(found, dict):
        return
    inner = next((found[key] for key in _ARGUMENTS if key in found), None)
    if isinstance(inner, dict) and any(found.get(key) == tool for key in _NAMES):
        yield inner
    yield found


def _written(value: dict[str, Any], passed: str) -> str | None:
    """Returns an object as JSON that begins with `passed`; None: it does not."""
    if passed and _objects(passed) == [value]:
        return passed
    for separators in (None, (",", ":")):
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=separators)
            text.encode()
        except (TypeError, ValueError):  # not JSON's, infinite, or half a character
            return None
        if text.startswith(passed):
            return text
    return None


def _is_likely(value: dict[str, Any], text: str, check: ArgumentCheck) -> bool:
    """Whether a repair neither made up a name nor lost a value."""
    known = check.schema.get("properties")
    if known and not check.schema.get("additionalProperties") and not value.keys() <= known.keys():
        return False
    return not _EMPTY_VALUE.search(json.dumps(value)) or _EMPTY_STRING.search(text) is not None


def _matches(check: ArgumentCheck, text: str) -> bool:
    try:
        check.parse(text)
    except WeftError:
        return False
    return True


def _ends_within_string(text: str) -> bool:
    """Whether a text was cut within a string, whose end must not be guessed: a path or command would be another one."""
    if text.rstrip()[-1:] in ("}", "]", ">", "`", '"', "'", ")", ";"):
        return False
    unescaped = re.sub(r"\\.", "", text, flags=re.DOTALL)
    return unescaped.count('"') % 2 == 1


def _objects(text: str) -> list[Any]:
    """Returns the JSON values with which a text begins."""
    found: list[Any] = []
    decoder = json.JSONDecoder()
    rest = text.strip()
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            break
        found.append(value)
        rest = rest[end:].lstrip(" \t\r\n,")
    return found


def _are_different(values: list[Any]) -> bool:
    """Whether two calls were written as one."""
    objects = [value for value in values if isinstance(value, dict) and value]
    return any(value != objects[0] for value in objects[1:])


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not a JSON value")
