"""The page of a resource: its document, its conditions and its events, and what its runner says of its engines."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from weft.documents.resource_kinds import ResourceKind
from weft_app.cli.columns import Document, graph_bytes, listing_of, shown_state, who_wakes
from weft_app.cli.formats import ago, formatted, moment_in, seconds_ago
from weft_app.cli.output import Column, block, page, safe_text, table_block

_EVENTS = (Column("AGE", "time", "ago"), Column("REASON", "reason"), Column("MESSAGE", "message"))
_CONDITIONS = (Column("TYPE", "type"), Column("STATUS", "status"), *_EVENTS[1:])
_TITLE = (Column("Name", "name"), Column("Kind", "kind"), Column("Status", lambda found: _state(found) or None))
MAX_TITLE_CHARS = 24
_SHORTER: Mapping[str, Callable[[Document], Any]] = {
    # Recipes may hold secrets.
    "wake": who_wakes,
    "graph": lambda workflow: f"{graph_bytes(workflow)} bytes",
}
"""What is shown of a value instead of it."""
_MAPS = frozenset({"labels", "defaultParams"})
"""Keys of objects whose keys are no words of ours."""
_TIMES = ("At", "Since", "Time")
MAX_ROWS = 10
_FORMS = (("Seconds", "{:g} s"), ("Bytes", "size"))
"""Formats of numbers, by the ends of their keys."""
_ELSEWHERE = frozenset({"kind", "name", "state", "status", "conditions", "instance", "instances"})
"""Keys of a resource that have their own place on a page."""


def description(
    document: Document,
    events: Sequence[Document],
    described: Sequence[Document] | None,
    users: Sequence[Document] = (),
) -> str:
    """Returns a resource as text; `described`: what its runner says of its engines, None: it says nothing.

    `users`: the resources that lead to it.
    """
    status = document["status"]
    facts = _rest(document) | _rest(status)
    facts |= {key: shorter(document) for key, shorter in _SHORTER.items() if key in document}
    lines = [*page(_TITLE, document), *_facts(facts)]
    lines += table_block("Conditions", _CONDITIONS, status["conditions"])
    for instance in [status["instance"]] if "instance" in status else status.get("instances", ()):
        own = {"process": "its runner is unreachable"}
        if described is not None:
            own = next((each for each in described if each["model"] == instance["model"]), {})
        lines += block(f"Instance {instance['model']}", _facts(instance | own))
    for word in dict.fromkeys(each["kind"] for each in users):
        kind, rows = ResourceKind(word), [each for each in users if each["kind"] == word]
        lines += table_block(kind.plural.capitalize(), listing_of(kind).columns, rows)
    lines += table_block("Events", _EVENTS, events) if events else ["Events:       none"]
    return "\n".join(lines) + "\n"


def _state(document: Document) -> str:
    return shown_state(document) if "state" in document["status"] else ""


def _rest(document: Document) -> Document:
    return {key: value for key, value in document.items() if key not in _ELSEWHERE}


def _facts(document: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each value of a document; parts of it, texts of several lines and lists are indented."""
    width = min(MAX_TITLE_CHARS, max((len(_title(key)) for key in document), default=0) + 1)
    for key, value in document.items():
        title = _title(key)
        if isinstance(value, Mapping) and key not in _MAPS:
            yield from block(title, _facts(value))
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            yield from table_block(title, _columns(value), value[-MAX_ROWS:])
        elif isinstance(value, list) and key.endswith("Lines"):
            yield from block(title, map(safe_text, value))
        elif isinstance(value, str) and "\n" in value:
            yield from block(title, map(safe_text, value.splitlines()))
        else:
            yield from page([Column(title, partial(_text, key))], value, width)


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    keys = dict.fromkeys(key for row in rows for key in row)
    return [Column(_title(key).upper(), partial(_cell, key)) for key in keys]


def _cell(key: str, row: Mapping[str, Any]) -> str | None:
    value = row.get(key)
    return ago(value) if isinstance(value, str) and key.endswith(_TIMES) else _text(key, value)


def _title(key: str) -> str:
    """Returns a key as words: "Context tokens"."""
    words = "".join(f" {each.lower()}" if each.isupper() else each for each in key.replace("_", " "))
    return words[:1].upper() + words[1:]


def _text(key: str, value: Any) -> str | None:
    """Returns a value for people; None: it says nothing."""
    if value is None or value in ("", [], {}, "unknown"):
        return None
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={each}" for name, each in value.items())
    if isinstance(value, list):
        return ", ".join(str(_text("", each)) for each in value)
    if isinstance(value, str) and key.endswith(_TIMES):
        moment = moment_in(value)
        left = (moment - datetime.now(UTC)).total_seconds()
        return f"{moment:%Y-%m-%d %H:%M:%S} UTC ({f'in {seconds_ago(left)}' if left > 0 else ago(moment)})"
    form = next((form for end, form in _FORMS if key.endswith(end) and isinstance(value, int | float)), "")
    return formatted(value, form) if form else str(value)
