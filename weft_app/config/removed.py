"""Takes out of a configuration what weft no longer has, and names what replaces it."""

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic.alias_generators import to_camel

from weft.kernel.errors.removed_features import RUNTIMES, SETTINGS
from weft_app.config.document import Document, GivenList, GivenMapping, location_of, value_of

_RUNNERS = "runners"
_EACH = "*"
_GOVERNANCE = ("registry", "governance", "mode")


def without_removed(document: Document) -> tuple[Document, tuple[str, ...]]:
    """Returns a document without what was removed from weft, and a message for each such part."""
    messages: list[str] = []
    for path, replacement in SETTINGS.items():
        locations: list[str] = []
        document = _without(document, path.split("."), locations)
        if locations:
            where = f" ({', '.join(filter(None, locations))})" if any(locations) else ""
            messages.append(f"{path}{where} was removed and is ignored; use: {replacement}")
    runners = value_of(document.get(_RUNNERS))
    if isinstance(runners, list):
        kept = GivenList(_kept_runners(runners, messages))
        kept.source = location_of(runners)
        document = document if len(kept) == len(runners) else {**document, _RUNNERS: kept}
    if _value_at(document, _GOVERNANCE) == "signatures":
        messages.append(
            "registry.governance.mode: signatures was removed, and every load, unload, pull, removal and flush is "
            "refused; use: mode: shared_key, with a key_file"
        )
    return document, tuple(messages)


def _without(item: Any, steps: Sequence[str], locations: list[str]) -> Any:
    """Returns a part of a document without the setting at a path, and adds the locations where it was."""
    first, *rest = steps
    if first == _EACH:
        if not isinstance(item, list):
            return item
        items = GivenList(_without(each, rest, locations) for each in item)
        items.source = location_of(item)
        return items
    name = to_camel(first) if isinstance(item, dict) and first not in item else first
    if not isinstance(item, dict) or name not in item:
        return item
    changed = GivenMapping(item)
    changed.source = getattr(item, "source", "")
    if rest:
        changed[name] = _without(item[name], rest, locations)
    else:
        locations.append(location_of(changed.pop(name)))
    return changed


def _value_at(item: Any, steps: Sequence[str]) -> Any:
    for step in steps:
        item = item.get(step) if isinstance(item, dict) else None
    return value_of(item)


def _kept_runners(runners: list[Any], messages: list[str]) -> Iterator[Any]:
    for runner in runners:
        runtime = value_of(runner.get("runtime")) if isinstance(runner, dict) else None
        if isinstance(runtime, str) and runtime in RUNTIMES:
            where = f" ({location_of(runner)})" if location_of(runner) else ""
            messages.append(
                f"the runner {value_of(runner.get('name'))}{where} is not started: its runtime {runtime} was removed; "
                f"use: {RUNTIMES[runtime]}"
            )
        else:
            yield runner
