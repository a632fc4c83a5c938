"""Error texts for invalid values of a configuration: what is expected, the value, the closest name, and the line."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from weft.kernel.errors.error_tree import FieldError, invalid_field
from weft.kernel.errors.validation_words import plain_words
from weft.kernel.models.model_source import shown_url
from weft.kernel.values.names import close_names
from weft_app.config.config import NamesTwiceError
from weft_app.config.document import PathSteps, location_of, sources, value_of
from weft_app.config.runners import OF_RUNTIME
from weft_app.config.settings_tree import names_at, settings_on

UNKNOWN_NAME = "unexpected_keyword_argument"
"""pydantic's error type for a name that a dataclass does not have."""
_NAMES_ELSEWHERE: Mapping[str, str] = MappingProxyType({"http_port": "port", "listen": "host", "bind": "host"})
"""Names that are not at the top of weft.yaml, and the top-level setting that is meant."""
MAX_SHOWN_CHARS = 40
"""Maximum length of a shown value."""
_MISSING = object()
_QUOTED = re.compile(r"'([^']*)'")
_TYPES = {
    **dict.fromkeys(("tuple_type", "list_type", "frozen_set_type"), "a list"),
    **dict.fromkeys(("dict_type", "dataclass_type"), "a mapping of names to values"),
    **dict.fromkeys(("int_type", "int_from_float"), "a whole number"),
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a text",
}
"""What is expected, by pydantic's error type."""
_LIMITS = {
    "greater_than": "must be more than {gt}{given}",
    "greater_than_equal": "must be at least {ge}{given}",
    "less_than": "must be less than {lt}{given}",
    "less_than_equal": "must be at most {le}{given}",
    "missing": "is missing",
    "finite_number": "must be a finite number{given}",
    "too_short": "must have {min_length} or more items",
    "too_long": "must have at most {max_length} items, and has {actual_length}",
    "string_too_short": "must have {min_length} or more characters",
    "string_too_long": "must have at most {max_length} characters",
}
"""Messages by pydantic's error type, with the names of its context."""


def refusals(
    kind: type,
    error: ValidationError,
    document: Mapping[str, Any],
    path: Path | None,
    *,
    without_runtime: Collection[int] = (),
) -> list[FieldError]:
    """Returns the errors of a document that a section rejects, unknown names first.

    `path` is the file of the document. Models of the runners `without_runtime` (indexes) were parsed with the default
    runtime's settings, so errors of that runtime are dropped.
    """
    found = sorted(_innermost(error.errors(include_url=False)), key=lambda each: each["type"] != UNKNOWN_NAME)
    found = [each for each in found if not _is_of_runtime(each, without_runtime)]
    told: dict[str, FieldError] = {}
    for details in found:
        field, message = _field_and_message(kind, details, document, path)
        told.setdefault(field, invalid_field(field, message))
    return list(told.values())


def _is_of_runtime(details: ErrorDetails, without_runtime: Collection[int]) -> bool:
    """Whether an error comes from the default runtime of a runner without one."""
    steps = details["loc"]
    return (
        steps[:1] == ("runners",) and steps[1:2] != () and steps[1] in without_runtime and details["type"] == OF_RUNTIME
    )


def _innermost(errors: list[ErrorDetails]) -> list[ErrorDetails]:
    """Removes errors that only follow from an error inside the same value."""
    around = {each["loc"][:count] for each in errors for count in range(1, len(each["loc"]))}
    return [each for each in errors if each["loc"] not in around]


def field_path(steps: PathSteps) -> str:
    """Returns a path as text, such as `runners.0.name`."""
    return ".".join(str(step) for step in steps) or "configuration"


def _field_and_message(
    kind: type, details: ErrorDetails, document: Mapping[str, Any], path: Path | None
) -> tuple[str, str]:
    """Returns the field of an error, and its message with the position."""
    steps = details["loc"]
    cause = details.get("ctx", {}).get("error")
    item, around = _item_at(document, steps)
    where = location(item if item is not _MISSING else around, path)
    if isinstance(cause, NamesTwiceError):
        return field_path(steps), f"{cause}{_where_named(document, cause.names, path)}"
    if isinstance(cause, FieldError):
        return field_path((*steps, cause.field)), f"{cause.message.removeprefix(f'{cause.field}: ')}{where}"
    return field_path(steps), f"{_message(kind, steps, details, item)}{where}"


def _item_at(document: Any, steps: PathSteps) -> tuple[Any, Any]:
    """Returns the value at a path, or `_MISSING`, and the innermost mapping or list that contains it."""
    around, item = document, document
    for step in steps:
        around, inner = item, value_of(item)
        if isinstance(inner, Mapping):
            item = inner.get(step, _MISSING)
        elif isinstance(inner, Sequence) and not isinstance(inner, str) and isinstance(step, int):
            item = inner[step] if step < len(inner) else _MISSING
        else:  # the name of an alternative of a union
            return item, around
        if item is _MISSING:
            break
    return item, around


def location(item: Any, path: Path | None) -> str:
    """Returns the end of a message: the value's line in the file or its other source, else the file."""
    return _ending(location_of(item), path)


def _ending(source: str, path: Path | None) -> str:
    if not source:
        return "" if path is None else f" (in {path})"
    if path is not None and " line " in source:
        return f" (in {path.parent / source})"
    return f" (from {source})"


def _where_named(document: Mapping[str, Any], names: frozenset[str], path: Path | None) -> str:
    """Returns the positions of the runners, models, agents and pools with these names."""
    found = [
        source
        for steps, source in sources(value_of(document.get("runners")))
        if steps[-1:] in (("name",), ("pool",)) and value_of(_item_at(value_of(document["runners"]), steps)[0]) in names
    ]
    return _ending(", ".join(dict.fromkeys(found)), path)


def _message(kind: type, steps: PathSteps, details: ErrorDetails, item: Any) -> str:
    """Returns the message for a value, without its position."""
    error, context = details["type"], details.get("ctx", {})
    given = _Shown(value_of(item), is_secret=any(each.is_secret for each in settings_on(kind, steps)))
    if error == UNKNOWN_NAME:
        known = names_at(kind, steps[:-1])
        meant = _NAMES_ELSEWHERE.get(str(steps[-1]), "") if len(steps) == 1 else ""
        return f"is not a setting{_close(meant if meant in known else steps[-1], known)}"
    if error in _LIMITS:
        return _LIMITS[error].format(**context, given=given)
    if error in ("literal_error", "enum"):
        return f"must be {context['expected']}{given}{_close(given.value, _QUOTED.findall(context['expected']))}"
    if error not in _TYPES:
        return plain_words(details["msg"])
    if given.value is None:
        return "has no value: write one, or remove the line"
    return f"must be {_TYPES[error]}{given}"


def _close(name: Any, names: Sequence[str]) -> str:
    close = close_names(str(name), names, most=1)
    return f"; {close}" if close else ""


class _Shown:
    """A wrong value. Its text is the end of a sentence, or empty if nothing can be shown."""

    def __init__(self, value: Any, *, is_secret: bool) -> None:
        self.value = value
        self.is_secret = is_secret

    def __str__(self) -> str:
        found = ""
        match self.value:
            case Mapping():
                found = "a mapping"
            case list() | tuple():
                found = "a list"
            case str():
                found = "a text" if self.is_secret else f"the text {_shortened(json.dumps(shown_url(self.value)))}"
            case bool() | int() | float():
                found = "not" if self.is_secret else json.dumps(self.value)
        return f", and is {found}" if found else ""


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."
