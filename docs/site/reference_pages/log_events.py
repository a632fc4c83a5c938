"""The log events, read from the calls of loggers in the source, without running it."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = ("gateway", "registry_svc", "router_svc", "runner_svc", "weft", "weft_app", "weft_extensions")
GENERATED = ROOT / "weft" / "api"
LEVELS = {"exception": "error"}
METHODS = ("debug", "info", "warning", "error", "exception", "critical")


@dataclass(slots=True)
class Event:
    """One event as its calls write it."""

    levels: set[str] = field(default_factory=set)
    components: set[str] = field(default_factory=set)
    fields: set[str] = field(default_factory=set)


def sources() -> Iterator[Path]:
    """Yields the source files."""
    for package in PACKAGES:
        yield from (each for each in sorted((ROOT / package).rglob("*.py")) if GENERATED not in each.parents)


def events_of(texts: Iterable[str]) -> dict[str, Event]:
    """Returns the events with a fixed name that these sources log."""
    found: defaultdict[str, Event] = defaultdict(Event)
    for text in texts:
        tree = ast.parse(text)
        component = _component(tree)
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and (level := _level(call)) and call.args:
                for name in _names(call.args[0]):
                    event = found[name]
                    event.levels.add(level)
                    event.components.add(component)
                    event.fields |= {each.arg for each in call.keywords if each.arg not in (None, "exc_info")}
    return dict(found)


def _component(tree: ast.Module) -> str:
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "get_logger":
            (name,) = call.args
            if isinstance(name, ast.Constant):
                return str(name.value)
    return ""


def _level(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "log":
        return LEVELS.get(function.attr, function.attr) if function.attr in METHODS else ""
    return ""


def _names(argument: ast.expr) -> Iterator[str]:
    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
        yield argument.value
    elif isinstance(argument, ast.IfExp):
        yield from _names(argument.body)
        yield from _names(argument.orelse)


def page() -> str:
    """Returns the page of all events."""
    rows = ["| event | level | component | fields |", "|---|---|---|---|"]
    for name, event in sorted(events_of(each.read_text("utf-8") for each in sources()).items()):
        columns = (sorted(each) for each in (event.levels, event.components, event.fields))
        levels, components, fields = (", ".join(f"`{each}`" for each in column if each) for column in columns)
        rows.append(f"| {name.replace('|', ' ')} | {levels} | {components} | {fields} |")
    return "\n".join((_HEAD, *rows, ""))


_HEAD = """# Log events

A line of an event has some or all of its fields. [Logs](../observe.md#logs) describes the fields that every line has.
"""
