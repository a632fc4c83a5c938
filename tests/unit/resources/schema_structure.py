"""JSON schemas reduced to what they demand: types, ranges, formats, names of fields and which are required."""

from collections.abc import Iterator
from typing import Any

WORDS = frozenset({"title", "description", "default", "discriminator", "$schema", "$defs"})


def structure(schema: Any) -> Any:
    """Returns a schema without its words, alternatives in order of their texts."""
    if isinstance(schema, list):
        return [structure(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for name, part in schema.items():
        if name == "properties":
            found[name] = {field: structure(own) for field, own in sorted(part.items())}
        elif name in ("required", "enum", "anyOf", "oneOf") or (name == "type" and isinstance(part, list)):
            found[name] = sorted((structure(own) for own in part), key=repr)
        elif name == "$ref":
            found[name] = part.rpartition("/")[2]
        elif name not in WORDS:
            found[name] = structure(part)
    return dict(sorted(found.items()))


def differences(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Yields the paths at which two structures differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted({*before, *after}):
            yield from differences(before.get(name), after.get(name), f"{path}.{name}".removeprefix("."))
    elif before != after:
        yield path
