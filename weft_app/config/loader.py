"""Reads the configuration: weft.yaml, weft.local.yaml beside it, environment and command line, validated into one tree.

Every limit has a name with its unit. Unknown names are refused: a typo must not silently mean the default.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from weft.kernel.errors import FieldError, invalid_field
from weft.kernel.reasons import Reason
from weft_app.config.config import CONFIG_NAME, WeftConfig
from weft_app.config.settings_tree import is_section, names_at, plain_value, settings_of

LOCAL_SUFFIX = ".local"
MAX_DEPTH = 64
UNKNOWN_NAME = "unexpected_keyword_argument"
"""pydantic's type of the error for a name that a dataclass does not have."""
COMMAND_LINE = "command line"
DEFAULT = "default"
CONCEALED = "***"
_NAME = "name"

Document = dict[str, Any]
"""A mapping of the file as YAML; its values may be `Given`."""
PathSteps = tuple[str | int, ...]
Section = TypeVar("Section")


@dataclass(frozen=True, slots=True)
class Given:
    """A value of a document, and where it comes from."""

    value: Any
    source: str
    """Such as "weft.yaml line 3" or "environment variable LOG_LEVEL"."""


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration, and where the values come from that are not defaults."""

    config: WeftConfig
    sources: Mapping[PathSteps, str]
    """By the path of the value in the tree."""


def load_config(
    path: Path | None, overrides: Mapping[str, Any] | None = None, below: Callable[[Document], Document] | None = None
) -> WeftConfig:
    """Returns the configuration from `path` (default: ./weft.yaml if it exists), its weft.local.yaml, and `overrides`.

    Later ones win, see `merge`. `below` adds the layer below the file: the environment. Raises INVALID_ARGUMENT naming
    file and field.
    """
    return load_with_sources(path, overrides, below).config


def load_with_sources(
    path: Path | None, overrides: Mapping[str, Any] | None = None, below: Callable[[Document], Document] | None = None
) -> LoadedConfig:
    """As `load_config`, with where each value comes from."""
    merged: Document = {}
    for file in config_files(path):
        merged = merge(merged, _read(file))
        path = path or file
    merged = merge(merged, _given(dict(overrides or {}), COMMAND_LINE))
    if below is not None:
        merged = below(merged)
    return LoadedConfig(parse_config(merged, path), dict(_sources(merged, ())))


def parse_config(document: Mapping[str, Any], path: Path | None = None) -> WeftConfig:
    """Returns the configuration that a document holds. Raises INVALID_ARGUMENT naming the field, and `path`."""
    return parse_section(WeftConfig, document, "" if path is None else f" (in {path})")


def parse_section(kind: type[Section], document: Mapping[str, Any], where: str = "") -> Section:
    """Returns the section of this kind that a document holds. Raises INVALID_ARGUMENT naming the field and `where`."""
    try:
        return validate_section(kind, document, where)
    except ValidationError as error:
        raise _field_error(kind, error, where) from error


def validate_section(kind: type[Section], document: Mapping[str, Any], where: str) -> Section:
    """As `parse_section`, with the ValidationError of what a section refuses."""
    validator: Any = _validator
    section: Section = validator(kind).validate_json(json.dumps(_plain(document, (), where)))
    return section


@cache
def _validator(kind: Any) -> TypeAdapter[Any]:
    # JSON: there arrays are tuples and texts are paths and enums, and all else is strict.
    return TypeAdapter(kind)


def config_files(path: Path | None) -> tuple[Path, ...]:
    """Returns the files that `load_config` reads, later ones over earlier ones; none without ./weft.yaml."""
    if path is None:
        path = Path(CONFIG_NAME)
        if not path.is_file():
            return ()
    local = path.with_name(f"{path.stem}{LOCAL_SUFFIX}{path.suffix}")
    return (path, local) if local.is_file() else (path,)


def merge(base: Document, over: Document) -> Document:
    """Returns `base` with `over` on top: mappings merged by key, lists of named items by name, the rest replaced."""
    result = dict(base)
    for key, value in over.items():
        result[key] = _merged(result.get(key), value)
    return result


def value_of(item: Any) -> Any:
    """Returns a value of a document without its source."""
    return item.value if isinstance(item, Given) else item


def _merged(below: Any, value: Any) -> Any:
    if isinstance(below, dict) and isinstance(value, dict):
        return merge(below, value)
    if _is_named(below) and _is_named(value):
        laid = {value_of(item[_NAME]): item for item in value}
        known = {value_of(item[_NAME]) for item in below}
        kept = [merge(item, laid.get(value_of(item[_NAME]), {})) for item in below]
        return [*kept, *(item for item in value if value_of(item[_NAME]) not in known)]
    return value


def _is_named(value: Any) -> bool:
    """Whether it is a list of items with unique names, such as runners and models."""
    if not isinstance(value, list) or not value:
        return False
    names = [value_of(item.get(_NAME)) if isinstance(item, dict) else None for item in value]
    return all(isinstance(name, str) for name in names) and len(set(names)) == len(names)


def _read(path: Path) -> Document:
    try:
        loader = yaml.SafeLoader(path.read_text("utf-8"))
        try:
            node = loader.get_single_node()
            document = None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except OSError as error:
        raise invalid_field("--config", f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)
        line = f" (line {where.line + 1})" if where is not None else ""
        raise FieldError("--config", f"{path} is not YAML{line}", Reason.MALFORMED_REQUEST) from error
    if document is None or node is None:
        return {}
    if not isinstance(document, dict):
        raise invalid_field("--config", f"{path} must be a mapping of names to values")
    return dict(_with_lines(document, node, path, 0))


def _with_lines(value: Any, node: yaml.Node, path: Path, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise invalid_field("--config", f"{path} is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, dict) and isinstance(node, yaml.MappingNode):
        nodes = {key.value: child for key, child in node.value}
        return {key: _with_lines(item, nodes.get(str(key), node), path, depth + 1) for key, item in value.items()}
    if isinstance(value, list) and isinstance(node, yaml.SequenceNode):
        return [_with_lines(item, child, path, depth + 1) for item, child in zip(value, node.value, strict=False)]
    return Given(value, f"{path.name} line {node.start_mark.line + 1}")


def _given(value: Any, source: str) -> Any:
    if isinstance(value, dict):
        return {key: _given(item, source) for key, item in value.items()}
    if isinstance(value, list):
        return [_given(item, source) for item in value]
    return value if isinstance(value, Given) else Given(value, source)


def _sources(item: Any, steps: PathSteps) -> Iterator[tuple[PathSteps, str]]:
    if isinstance(item, dict):
        for key, value in item.items():
            yield from _sources(value, (*steps, key))
    elif isinstance(item, list):
        for index, value in enumerate(item):
            yield from _sources(value, (*steps, index))
    elif isinstance(item, Given):
        yield steps, item.source


def _plain(item: Any, steps: PathSteps, where: str) -> Any:
    """Returns a document as JSON types; a value that JSON lacks becomes a mapping, which no setting accepts."""
    item = value_of(item)
    match item:
        case Mapping():
            strange = next((key for key in item if not isinstance(key, str)), None)
            if strange is not None:
                raise invalid_field(_field((*steps, str(strange))), f"must be a text; put it in quotes{where}")
            return {key: _plain(value, (*steps, key), where) for key, value in item.items()}
        case list() | tuple() | frozenset():
            return [_plain(value, (*steps, index), where) for index, value in enumerate(item)]
        case Enum():
            return item.value
        case Path():
            return str(item)
        case None | bool() | int() | float() | str():
            return item
        case _:  # YAML has dates and bytes, too
            return {type(item).__name__: str(item)}


def _field(steps: PathSteps) -> str:
    return ".".join(str(step) for step in steps) or "configuration"


def _field_error(kind: type, error: ValidationError, where: str) -> FieldError:
    first = error.errors(include_url=False)[0]
    steps, message = first["loc"], first["msg"].removeprefix("Value error, ")
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, FieldError):
        steps, message = (*steps, cause.field), cause.message.removeprefix(f"{cause.field}: ")
    elif first["type"] == UNKNOWN_NAME:
        message = _unknown(kind, steps)
    elif first["type"] == "dataclass_type":
        message = "must be a mapping of names to values"
    return invalid_field(_field(steps), f"{message}{where}")


def _unknown(kind: type, steps: PathSteps) -> str:
    close = get_close_matches(str(steps[-1]), names_at(kind, steps[:-1]), n=1)
    return "is not a setting" + (f"; did you mean {close[0]}?" if close else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveValue:
    """One value of the configuration."""

    name: str
    """Its path, such as `router.queue_timeout_seconds`."""
    value: Any
    """As weft.yaml would write it; CONCEALED for a secret that is set."""
    source: str
    """Such as "weft.yaml line 3", "environment variable LOG_LEVEL" or DEFAULT."""


def effective_values(loaded: LoadedConfig) -> Iterator[EffectiveValue]:
    """Yields every value of the configuration, in the order of the reference."""
    yield from _section_values(loaded.config, (), loaded.sources)


def _section_values(section: Any, steps: PathSteps, sources: Mapping[PathSteps, str]) -> Iterator[EffectiveValue]:
    for setting in settings_of(section.__class__):
        value = getattr(section, setting.name)
        yield from _values(value, (*steps, setting.name), sources, is_secret=setting.is_secret)


def _values(
    value: Any, steps: PathSteps, sources: Mapping[PathSteps, str], *, is_secret: bool
) -> Iterator[EffectiveValue]:
    if is_section(type(value)):
        yield from _section_values(value, steps, sources)
    elif isinstance(value, Mapping) and value and is_section(type(next(iter(value.values())))):
        for key, item in value.items():
            yield from _section_values(item, (*steps, key), sources)
    elif isinstance(value, tuple) and value and is_section(type(value[0])):
        for index, item in enumerate(value):
            yield from _section_values(item, (*steps, index), sources)
    else:
        shown = CONCEALED if is_secret and value not in (None, (), {}) else plain_value(value)
        yield EffectiveValue(name=".".join(map(str, steps)), value=shown, source=_source(steps, sources))


def _source(steps: PathSteps, sources: Mapping[PathSteps, str]) -> str:
    """Returns the source of a value, or of the first item of a list or mapping."""
    exact = sources.get(steps)
    if exact is not None:
        return exact
    inner = (source for path, source in sources.items() if path[: len(steps)] == steps)
    return next(inner, DEFAULT)
