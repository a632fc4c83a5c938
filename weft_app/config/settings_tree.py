"""The settings tree as data for the reference, the schema, and `weft config show`."""

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum, IntEnum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from weft.documents.document_base import field_docstrings
from weft.kernel.models.model_source import shown_url
from weft.kernel.settings.setting_annotations import ConstantMark, Public, Secret
from weft.kernel.values.units import Rate

REQUIRED = object()
"""The default of a setting without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting of a section."""

    name: str
    annotation: Any
    default: Any
    """REQUIRED if there is none."""
    is_public: bool
    is_secret: bool
    sections: tuple[type, ...]
    """The sections in its value: its own type, or the item type of a list or mapping."""


def is_section(kind: Any) -> bool:
    """Whether a type is a section of settings."""
    if not isinstance(kind, type) or get_origin(kind) is not None:
        return False
    return is_dataclass(kind) and kind is not Rate


@cache
def settings_of(section: Any) -> tuple[Setting, ...]:
    """Returns the settings of a section in order of declaration, without its constants."""
    hints = get_type_hints(section, include_extras=True)
    found: list[Setting] = []
    for field in fields(section):
        if any(isinstance(mark, ConstantMark) for mark in _marks(hints[field.name])):
            continue
        default = REQUIRED if field.default is MISSING else field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        found.append(_setting(field.name, hints[field.name], default))
    return tuple(found)


def _setting(name: str, annotation: Any, default: Any) -> Setting:
    marks = list(_marks(annotation))
    return Setting(
        name=name,
        annotation=annotation,
        default=default,
        is_public=any(isinstance(mark, Public) for mark in marks),
        is_secret=any(isinstance(mark, Secret) for mark in marks),
        sections=tuple(dict.fromkeys(_sections(annotation))),
    )


def _marks(annotation: Any) -> Iterator[Any]:
    """Yields the marks of the setting, not those of its items."""
    if get_origin(annotation) is Annotated:
        inner, *marks = get_args(annotation)
        yield from marks
        yield from _marks(inner)
    elif get_origin(annotation) in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from _marks(part)


def _sections(annotation: Any) -> Iterator[type]:
    if is_section(annotation):
        yield annotation
    elif get_origin(annotation) is Annotated:
        yield from _sections(get_args(annotation)[0])
    else:
        for part in get_args(annotation):
            yield from _sections(part)


def sections_at(root: type, steps: Sequence[str | int]) -> tuple[type, ...]:
    """Returns the section types at a path: PoolSettings for `("router", "pools", "chat")`."""
    found: tuple[type, ...] = (root,)
    for step in steps:
        inner = [setting for section in found for setting in settings_of(section) if setting.name == step]
        # Other steps are keys of a mapping or indexes of a list.
        found = tuple(kind for setting in inner for kind in setting.sections) if inner else found
    return found


def settings_on(root: type, steps: Sequence[str | int]) -> list[Setting]:
    """Returns the settings along a path, the outermost first; if sections share a name, the first."""
    found = []
    for count, step in enumerate(steps):
        inner = (setting for section in sections_at(root, steps[:count]) for setting in settings_of(section))
        found += [setting for setting in inner if setting.name == step][:1]
    return found


def names_at(root: type, steps: Sequence[str | int]) -> list[str]:
    """Returns the names of the settings at a path."""
    names = (setting.name for section in sections_at(root, steps) for setting in settings_of(section))
    return list(dict.fromkeys(names))


def descriptions_of(section: type) -> Mapping[str, str]:
    """Returns the docstrings below the fields of a section, each as one line, by field."""
    return {field: " ".join(text.split()) for field, text in field_docstrings(section).items()}


def plain_value(value: Any) -> Any:
    """Returns a value in the form of weft.yaml, for display: URLs without credentials."""
    plain = value
    match value:
        case Rate():
            plain = str(value).replace(" ", "")
        case IntEnum():
            plain = value.name.lower()
        case Enum():
            plain = value.value
        case str():
            plain = shown_url(value)
        case Path():
            plain = str(value)
        case frozenset():
            plain = sorted(plain_value(item) for item in value)
        case tuple() | list():
            plain = [plain_value(item) for item in value]
        case Mapping():
            plain = {key: plain_value(item) for key, item in value.items()}
        case _ if is_section(type(value)):
            names = [setting.name for setting in settings_of(value.__class__)]
            plain = {name: plain_value(getattr(value, name)) for name in names}
    return plain
