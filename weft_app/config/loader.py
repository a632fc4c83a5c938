"""Reads the configuration from weft.yaml, weft.local.yaml beside it, the environment and the command line.

Every limit has a name with its unit. Unknown names are rejected: a typo must not silently select the default.
"""

import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic.alias_generators import to_camel

from weft.kernel.errors.error_tree import FieldError, invalid_field, refused_together
from weft.kernel.errors.reasons import Reason
from weft_app.config.config import CONFIG_NAME, WeftConfig
from weft_app.config.document import (
    Document,
    GivenList,
    GivenMapping,
    PathSteps,
    given_by,
    merge,
    read_file,
    sources,
    value_of,
)
from weft_app.config.inference import infer
from weft_app.config.refusals import field_path, location, refusals
from weft_app.config.removed import without_removed
from weft_app.config.settings_tree import Setting, is_section, plain_value, settings_of


def with_names_of_settings(section: type, document: Document) -> Document:
    """Returns a section's document with the canonical name of each setting, whichever spelling the file uses.

    Other keys are unchanged: names in mappings, unknown ones, and a setting's second spelling.
    """
    renamed: Document = _renamed((section,), document)
    return renamed


def _renamed(sections: Sequence[type], item: Any) -> Any:
    if isinstance(item, list):
        found = GivenList(_renamed(sections, each) for each in item)
        found.source = getattr(item, "source", "")
        return found
    if not isinstance(item, dict) or not sections:
        return item
    mapping, settings = GivenMapping(), _settings_by_name(tuple(sections))
    mapping.source = getattr(item, "source", "")
    for key, value in item.items():
        name = _names_by_spelling(tuple(sections)).get(key, key)
        name = key if name in item else name
        mapping[name] = _value_of_setting(settings.get(name, ()), value)
    return mapping


def _value_of_setting(settings: Sequence[Setting], value: Any) -> Any:
    inner = tuple(dict.fromkeys(kind for setting in settings for kind in setting.sections))
    if isinstance(value, dict) and any(_has_free_keys(setting.annotation) for setting in settings):
        mapping = GivenMapping((key, _renamed(inner, each)) for key, each in value.items())
        mapping.source = getattr(value, "source", "")
        return mapping
    return _renamed(inner, value)


def _has_free_keys(annotation: Any) -> bool:
    """Whether a setting is a mapping with names as keys, such as those of pools."""
    if get_origin(annotation) is Annotated:
        return _has_free_keys(get_args(annotation)[0])
    if isinstance(get_origin(annotation), type) and issubclass(get_origin(annotation), Mapping):
        return True
    return any(map(_has_free_keys, get_args(annotation)))


@cache
def _settings_by_name(sections: tuple[type, ...]) -> Mapping[str, tuple[Setting, ...]]:
    found: dict[str, tuple[Setting, ...]] = {}
    for section in sections:
        for setting in settings_of(section):
            found[setting.name] = (*found.get(setting.name, ()), setting)
    return MappingProxyType(found)


@cache
def _names_by_spelling(sections: tuple[type, ...]) -> Mapping[str, str]:
    return MappingProxyType({to_camel(name): name for name in _settings_by_name(sections)})


LOCAL_SUFFIX = ".local"
SETTINGS_VARIABLE = "LLM_POOL_SETTINGS_PATH"
"""Environment variable with the path of the file if `--config` is not given."""
LOCAL_SETTINGS_VARIABLE = "LLM_POOL_LOCAL_SETTINGS_PATH"
"""Environment variable with the path of the file to merge over it instead of weft.local.yaml."""
COMMAND_LINE = "command line"
DEFAULT = "default"
CONCEALED = "***"
Section = TypeVar("Section")


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration, and the sources of values that are not defaults."""

    config: WeftConfig
    sources: Mapping[PathSteps, str]
    """Sources by path in the tree."""
    removed: tuple[str, ...] = ()
    """Messages about ignored parts that were removed from weft, with their replacements."""


def load_config(
    path: Path | None, overrides: Mapping[str, Any] | None = None, below: Callable[[Document], Document] | None = None
) -> WeftConfig:
    """Returns the configuration from `path` (default: ./weft.yaml if it exists), its weft.local.yaml, and `overrides`.

    Later ones win, see `merge`. `below` adds the layer below the file: the environment. Raises INVALID_ARGUMENT naming
    file and field.
    """
    return load_with_sources(path, overrides, below).config


def load_files(
    files: Sequence[Path],
    overrides: Mapping[str, Any] | None = None,
    below: Callable[[Document], Document] | None = None,
) -> WeftConfig:
    """As `load_config`, from these files."""
    return load_document(read_files(files), files[0] if files else None, overrides, below).config


def load_with_sources(
    path: Path | None, overrides: Mapping[str, Any] | None = None, below: Callable[[Document], Document] | None = None
) -> LoadedConfig:
    """As `load_config`, with the sources of values."""
    files = config_files(path)
    return load_document(read_files(files), files[0] if files and path is None else path, overrides, below)


def read_files(files: Iterable[Path]) -> Document:
    """Merges files, with later ones overriding earlier ones. Raises as `read_file`."""
    merged: Document = {}
    for file in files:
        merged = merge(merged, with_names_of_settings(WeftConfig, read_file(file)))
    return merged


def load_document(
    document: Document,
    path: Path | None,
    overrides: Mapping[str, Any] | None = None,
    below: Callable[[Document], Document] | None = None,
) -> LoadedConfig:
    """As `load_with_sources`, with the document of the file at `path`."""
    merged, removed = without_removed(merge(document, given_by(COMMAND_LINE, dict(overrides or {}))))
    merged = infer(merged).document
    if below is not None:
        merged = below(merged)
    return LoadedConfig(parse_config(merged, path), dict(sources(merged)), removed)


def parse_config(document: Mapping[str, Any], path: Path | None = None) -> WeftConfig:
    """Parses a document. Raises INVALID_ARGUMENT naming wrong fields and their positions."""
    found = infer(dict(document))
    refused = list(found.refused.values())
    try:
        config = validate_section(WeftConfig, found.document, path)
    except ValidationError as error:
        named = refusals(WeftConfig, error, found.document, path, without_runtime=found.refused.keys())
        raise refused_together([*named, *refused]) from error
    if refused:
        raise refused_together(refused)
    return _with_enabled_models(config)


def _with_enabled_models(config: WeftConfig) -> WeftConfig:
    """Removes disabled models. Raises INVALID_ARGUMENT for a runner without any other."""
    runners = config.runners or ()
    if all(model.enabled for runner in runners for model in runner.models):
        return config
    for runner in runners:
        if runner.url is None and not any(model.enabled for model in runner.models):
            raise invalid_field(
                f"runners.{runner.name}.models", "none is enabled; enable one (enabled: true), or take the runner out"
            )
    return replace(
        config,
        runners=tuple(
            replace(runner, models=tuple(model for model in runner.models if model.enabled)) for runner in runners
        ),
    )


def parse_section(kind: type[Section], document: Mapping[str, Any]) -> Section:
    """Parses a section. Raises INVALID_ARGUMENT naming the field."""
    try:
        return validate_section(kind, document, None)
    except ValidationError as error:
        raise refused_together(refusals(kind, error, document, None)) from error


def validate_section(kind: type[Section], document: Mapping[str, Any], path: Path | None) -> Section:
    """As `parse_section`, but raises ValidationError for what a section rejects."""
    validator: Any = _validator
    section: Section = validator(kind).validate_json(json.dumps(plain_document(document, path)))
    return section


@cache
def _validator(kind: Any) -> TypeAdapter[Any]:
    # JSON mode converts arrays to tuples and strings to paths and enums, and is strict otherwise.
    return TypeAdapter(kind)


def config_files(path: Path | None, environment: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """Returns the files that `load_config` reads, in order of merging; empty without ./weft.yaml.

    `path`, the file of `--config`, takes precedence over its variable. Raises INVALID_ARGUMENT if a variable contains
    the path of a missing file, PERMISSION_DENIED if a file that nothing names may be one that another user put there.
    """
    named = path or _named_by(SETTINGS_VARIABLE, environment)
    local = _named_by(LOCAL_SETTINGS_VARIABLE, environment)
    main = named or Path(CONFIG_NAME)
    if named is None and _is_missing(main):
        return () if local is None else (local,)
    unnamed = [main] if named is None else []
    beside = main.with_name(f"{main.stem}{LOCAL_SUFFIX}{main.suffix}")
    if local is None:
        with suppress(OSError):  # a folder of another user, in which the file itself cannot be read either
            if beside.is_file():
                local = beside
                unnamed.append(beside)
    for file in unnamed:
        _require_not_planted(file)
    return (main,) if local is None else (main, local)


def _require_not_planted(file: Path) -> None:
    """Raises PERMISSION_DENIED for a file of another user in a folder that all users can write, such as /tmp."""
    with suppress(OSError):  # reading it then reports why
        owners = {file.lstat().st_uid, file.stat().st_uid}
        is_for_all = file.parent.stat().st_mode & stat.S_IWOTH
        if hasattr(os, "geteuid") and is_for_all and not owners <= {os.geteuid(), 0}:
            what = f"{file.absolute()} belongs to another user, and would choose the programs to run"
            raise FieldError("--config", f"{what}; use a folder that only you can write", Reason.PERMISSION_DENIED)


def _named_by(variable: str, environment: Mapping[str, str]) -> Path | None:
    """Returns the path in a variable; None if it is not set or empty."""
    text = environment.get(variable, "").strip()
    if not text:
        return None
    named = Path(text).expanduser()
    if _is_missing(named):
        raise invalid_field(variable, f"names {named}, which is no file; correct the variable, or unset it")
    return named


def _is_missing(path: Path) -> bool:
    """Whether there is no such file; False if that is not known: reading it then reports why."""
    try:
        return not path.is_file()
    except OSError:
        return False


def plain_document(document: Mapping[str, Any], path: Path | None = None) -> dict[str, Any]:
    """Converts a document to JSON types, without sources. Raises INVALID_ARGUMENT naming a key that is not text."""
    plain: dict[str, Any] = _plain(document, (), path)
    return plain


def _plain(item: Any, steps: PathSteps, path: Path | None) -> Any:
    """Converts a document to JSON types; other values become mappings, which no setting accepts."""
    item = value_of(item)
    match item:
        case Mapping():
            for key in item:
                if not isinstance(key, str):
                    field, where = field_path((*steps, str(key))), location(item[key], path)
                    raise invalid_field(field, f"must be a text; put it in quotes{where}")
            return {key: _plain(value, (*steps, key), path) for key, value in item.items()}
        case list() | tuple() | frozenset():
            return [_plain(value, (*steps, index), path) for index, value in enumerate(item)]
        case Enum():
            return item.value
        case Path():
            return str(item)
        case None | bool() | int() | float() | str():
            return item
        case _:  # such as dates and bytes of YAML
            return {type(item).__name__: str(item)}


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveValue:
    """One value of the configuration."""

    name: str
    """Path, such as `router.queue_timeout_seconds`."""
    value: Any
    """In the form of weft.yaml; CONCEALED for a secret that is set."""
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
