"""The configuration as it takes effect: every value with where it comes from, secrets concealed."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from weft_app.config.loader import LoadedConfig, PathSteps
from weft_app.config.reference import plain_value
from weft_app.config.settings_tree import is_section, settings_of

DEFAULT = "default"
CONCEALED = "***"


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
    yield from _section(loaded.config, (), loaded.sources)


def _section(section: Any, steps: PathSteps, sources: Mapping[PathSteps, str]) -> Iterator[EffectiveValue]:
    for setting in settings_of(section.__class__):
        value = getattr(section, setting.name)
        yield from _value(value, (*steps, setting.name), sources, is_secret=setting.is_secret)


def _value(
    value: Any, steps: PathSteps, sources: Mapping[PathSteps, str], *, is_secret: bool
) -> Iterator[EffectiveValue]:
    if is_section(type(value)):
        yield from _section(value, steps, sources)
    elif isinstance(value, Mapping) and value and is_section(type(next(iter(value.values())))):
        for key, item in value.items():
            yield from _section(item, (*steps, key), sources)
    elif isinstance(value, tuple) and value and is_section(type(value[0])):
        for index, item in enumerate(value):
            yield from _section(item, (*steps, index), sources)
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
