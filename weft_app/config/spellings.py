"""The spelling of settings: files may say `contextTokens`, as documents do, for `context_tokens`."""

from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, get_args, get_origin

from pydantic.alias_generators import to_camel

from weft_app.config.document import Document, GivenList, GivenMapping
from weft_app.config.settings_tree import Setting, settings_of


def with_names_of_settings(section: type, document: Document) -> Document:
    """Returns a document of a section with each setting under its own name, whichever spelling the file has.

    Other keys stay as they are: those of mappings whose keys are names, unknown ones, and a setting's second spelling.
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
    """Whether a setting is a mapping, of which the keys are names, such as those of pools."""
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
