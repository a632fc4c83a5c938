"""The command line of an engine's program, as declared by a model's settings."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from runner_svc.runtimes.settings import Argument, ModelSettings


def flags_of(model: ModelSettings, chosen: Mapping[str, Any]) -> list[str]:
    """Returns the flags of a model's marked settings. Values in `chosen`, by setting, override configured ones."""
    return [
        word
        for setting, flag in marked_settings(type(model))
        for word in _words(flag, chosen.get(setting, getattr(model, setting)))
    ]


def marked_settings(kind: type[ModelSettings]) -> Sequence[tuple[str, str]]:
    """Returns the marked settings of a model class with their flags."""
    hints = get_type_hints(kind, include_extras=True)
    return tuple(
        (name, mark.name) for name, hint in hints.items() for mark in _marks(hint) if isinstance(mark, Argument)
    )


def _marks(hint: Any) -> Iterator[Any]:
    """Yields the annotations of a type, or of the members of a union."""
    if get_origin(hint) is Annotated:
        yield from hint.__metadata__
        return
    for member in get_args(hint):
        if get_origin(member) is Annotated:
            yield from member.__metadata__


def _words(flag: str, value: Any) -> list[str]:
    if value is None or value is False or value == ():
        return []
    if value is True:
        return [flag]
    return [flag, ",".join(map(_word, value)) if isinstance(value, tuple) else _word(value)]


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
