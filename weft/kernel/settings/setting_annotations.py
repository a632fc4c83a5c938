"""Annotations for settings: ranges, parsing from text, and marks for public, secret and constant ones.

Services declare settings as frozen dataclasses with these annotations and those of `annotated_types`;
`weft_app.config` reads weft.yaml into them. This module does not import pydantic, which finds `Checked`, `Read`,
`Before`, `Pattern` and `Constant` by their method.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from annotated_types import Ge, Gt, Le, MaxLen

from weft.kernel.errors.error_tree import FieldError
from weft.kernel.values.names import MODEL_NAME_WORDS, ascii_name, is_model_name, is_name
from weft.kernel.values.reach import ADDRESS, FILE, NAME, PLAIN
from weft.kernel.values.units import Rate, parse_any_rate, parse_rate, parse_rates, parse_size

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True, slots=True)
class Public:
    """Marks a setting that operators change. All others are advanced, with defaults that suit most meshes."""


PUBLIC = Public()


@dataclass(frozen=True, slots=True)
class Secret:
    """Marks a setting with a value that is never shown."""


SECRET = Secret()


@dataclass(frozen=True, slots=True)
class ConstantMark:
    """Marks a field of a section that no file can set."""

    def __get_pydantic_core_schema__(self, _source: Any, _handler: Any) -> Any:
        function = {"type": "no-info", "function": _refuse_constant}
        return {"type": "function-plain", "function": function, "json_schema_input_schema": {"type": "any"}}


def _refuse_constant(_: Any) -> Any:
    from pydantic_core import PydanticKnownError  # noqa: PLC0415 - pydantic calls it

    raise PydanticKnownError("unexpected_keyword_argument")


T = TypeVar("T")
Constant = Annotated[T, ConstantMark()]
"""The type of such a field: `Constant[float]`."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A check after type validation: `check` returns the value to use, or raises ValueError."""

    check: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return _after(self.check, handler(source))


@dataclass(frozen=True, slots=True)
class Read:
    """A value written as another type: `read` parses a `form`, or raises ValueError."""

    form: Any
    read: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, _source: Any, handler: Any) -> Any:
        return _after(self.read, handler.generate_schema(self.form))


@dataclass(frozen=True, slots=True)
class Before:
    """A conversion before type validation."""

    change: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        function = {"type": "no-info", "function": self.change}
        return {"type": "function-before", "function": function, "schema": handler(source)}


@dataclass(frozen=True, slots=True)
class Pattern:
    """A text in which the regular expression finds a match."""

    regex: str

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return {**handler(source), "pattern": self.regex}


class SettingError(FieldError, ValueError):
    """Two settings that contradict each other. Also a ValueError, so that pydantic adds its location in the file."""


def _after(function: Callable[[Any], Any], schema: Any) -> dict[str, Any]:
    return {"type": "function-after", "function": {"type": "no-info", "function": function}, "schema": schema}


def _require_name(text: str) -> str:
    if not is_name(text):
        raise ValueError("must be letters, digits, '.', '_', ':' or '-', starting with a letter or digit")
    return text


def checked_model_name(text: str) -> str:
    """Returns `ascii_name` of `text`. Raises ValueError unless it may name a model or a pool."""
    name = ascii_name(text)
    if not is_model_name(name):
        raise ValueError(f"must be {MODEL_NAME_WORDS}")
    return name


def _parsed(parse: Callable[[Any, str], Any], value: Any) -> Any:
    try:
        return parse(value, "")
    except FieldError as error:
        raise ValueError(error.message.removeprefix(f"{error.field}: ")) from None


def _path(text: str) -> Path:
    path = Path(text)
    try:
        path.expanduser()
    except RuntimeError:
        raise ValueError(f"there is no user {path.parts[0][1:]}; a file of yours begins with ~/") from None
    return path


def _check_any_rate(text: str) -> str:
    _parsed(parse_any_rate, text)
    return text


def _check_size(text: str) -> str:
    _parsed(parse_size, text)
    return text


_VARIABLE = re.compile(r"\$\{[^}]*\}?")


def _require_no_variable(text: str) -> str:
    if (found := _VARIABLE.search(text)) is not None:
        raise ValueError(f"has {found[0]}, and variables are not expanded: write the address itself")
    return text


def off_for_false(value: Any) -> Any:
    """Returns `off` for false, since YAML reads a bare `off` as false."""
    return "off" if value is False else value


def word_for_flag(value: Any) -> Any:
    """Returns `yes` and `no` for true and false, since YAML reads the bare words as booleans."""
    return {True: "yes", False: "no"}.get(value, value) if isinstance(value, bool) else value


Name = Annotated[str, Checked(_require_name), NAME]
"""Name of a runner, agent, tool or another resource except models and pools."""
ModelName = Annotated[str, Checked(checked_model_name), NAME]
"""Name of a model or pool."""
UrlText = Annotated[str, MaxLen(2048), Checked(_require_no_variable), ADDRESS]
Seconds = Annotated[float, Gt(0), Le(86_400 * 365)]
Port = Annotated[int, Ge(0), Le(65_535)]
PathText = Annotated[Path, Read(str, _path), FILE]
"""A path; `~` is expanded when the file is read."""
SizeText = Annotated[str, Checked(_check_size), PLAIN]
"""A size with its unit, such as `200GiB`."""
RequestRate = Annotated[Rate, Read(str, partial(_parsed, parse_rate))]
"""A request rate such as `100req/min`."""
Rates = Annotated[
    tuple[Rate, ...], Read(tuple[Annotated[str, Checked(_check_any_rate)], ...], partial(_parsed, parse_rates))
]
"""Rates that apply together, such as `100req/min` and `20000tok/min`."""


def require_positive(settings: "DataclassInstance", *, may_be_zero: frozenset[str] = frozenset()) -> None:
    """Checks the numeric fields of `settings`. Raises SettingError for one that is not greater than zero."""
    for field in fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if not math.isfinite(value) or value < 0 or (value == 0 and field.name not in may_be_zero):
            raise SettingError(field.name, "must be a number greater than zero")


def values_of(kind: "type[DataclassInstance]", settings: "DataclassInstance") -> dict[str, Any]:
    """Returns the values in `settings` of the fields of `kind`, for a service's configuration that extends `kind`."""
    return {field.name: getattr(settings, field.name) for field in fields(kind)}
