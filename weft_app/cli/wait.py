"""`weft mesh wait`: wait for a condition of a resource."""

import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import typer

from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.unknown_names import unknown_name
from weft_app.cli.follow import follow
from weft_app.cli.get import ResourcesArgument
from weft_app.cli.mesh_api import Document, connect
from weft_app.cli.options import DEFAULT_HOME, HomeOption
from weft_app.cli.targets import Target, one_target, record_kind
from weft_app.cli.tasks import wait_for_task
from weft_app.cli.terminal import say

MAX_TIMEOUT_SECONDS = 7 * 86_400.0

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)?")
_UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}
_WITH_STATUS = frozenset({ResourceKind.MODEL, ResourceKind.AGENT, ResourceKind.RUNNER, ResourceKind.ROUTE})
_STATES = ("active", "inactive", "hibernating", "failed")


Expectation = Callable[[Document | None], bool]
"""Whether a resource meets the condition; None: it does not exist."""


def wait(
    resources: ResourcesArgument,
    expected: Annotated[
        str | None,
        typer.Option(
            "--for",
            help="ready (default), status=active, condition=Ready=false, exists or delete; for a task, such as "
            "status=running (default: its end).",
            metavar="WHAT",
        ),
    ] = None,
    timeout: Annotated[
        str, typer.Option(help="Timeout, such as 90s, 5m or 1h; 0 checks once.", metavar="TIME")
    ] = "60s",
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Wait for a condition of a resource, or for the end of a task. Exit code 5 on timeout.

    Exit code 1 for a task that ended otherwise.

    Example: weft mesh wait model qwen --for status=active --timeout 5m
    """
    seconds = parse_duration(timeout)
    if record_kind(resources[0]) == "task":
        wait_for_task(resources, expected, seconds, home)
        return
    target, wanted = one_target(resources), expected or "condition=Ready"
    _wait(target, parse_expectation(wanted, target.kind), seconds, home)
    say(f"{target}: {wanted}\n")


_NO_STATUS_OF_ALIAS = "an alias has no status; wait for exists or delete, or for its target"
_NO_STATUS_OF_WORKFLOW = "a workflow has no status here; wait for its model, or for exists or delete"
_UNKNOWN: Mapping[tuple[str, ResourceKind], str] = MappingProxyType(
    {
        ("status", ResourceKind.POOL): "a pool has no status; wait for condition=Ready",
        ("status", ResourceKind.ALIAS): _NO_STATUS_OF_ALIAS,
        ("condition", ResourceKind.ALIAS): _NO_STATUS_OF_ALIAS,
        ("status", ResourceKind.WORKFLOW): _NO_STATUS_OF_WORKFLOW,
        ("condition", ResourceKind.WORKFLOW): _NO_STATUS_OF_WORKFLOW,
    }
)
"""Conditions that do not exist, and alternatives."""


def parse_expectation(text: str, kind: ResourceKind) -> Expectation:
    """Parses `--for`. Raises INVALID_ARGUMENT."""
    what, _, rest = text.lower().partition("=")
    match what:
        case "exists" | "create" if not rest:
            return lambda document: document is not None
        case "delete" if not rest:
            return lambda document: document is None
        case "status" if rest in _STATES and kind in _WITH_STATUS:
            return _status(rest)
        case "status" | "condition" if (what, kind) in _UNKNOWN:
            raise invalid_field("--for", _UNKNOWN[what, kind])
        case "status" | "condition" if not _condition_types(kind):
            raise invalid_field("--for", f"a {kind.value} has no status; wait for exists or delete")
        case "condition" if rest:
            name, _, value = rest.partition("=")
            return _condition(name, value or "true", kind)
        case word if not rest and word in _STATES and kind in _WITH_STATUS:
            return _status(word)
        case word if not rest and word in _condition_names(kind):
            return _condition(word, "true", kind)
        case _:
            states = ", ".join(f"status={state}" for state in _STATES)
            raise invalid_field("--for", f"must be ready, {states}, condition=NAME, exists or delete")


def _status(state: str) -> Expectation:
    return lambda document: document is not None and _state_of(document) == state


def _condition(name: str, value: str, kind: ResourceKind) -> Expectation:
    if name not in _condition_names(kind):
        raise invalid_field("--for", f"the conditions of a {kind.value} are {', '.join(_condition_types(kind))}")
    if value not in ("true", "false", "unknown"):
        raise invalid_field("--for", "a condition is true, false or unknown")
    return lambda document: any(
        one["type"].lower() == name and one["status"].lower() == value
        for one in (document or {"status": {"conditions": ()}})["status"]["conditions"]
    )


def _condition_names(kind: ResourceKind) -> frozenset[str]:
    return frozenset(name.lower() for name in _condition_types(kind))


def _condition_types(kind: ResourceKind) -> tuple[str, ...]:
    return {
        ResourceKind.MODEL: ("HasRunner", "Awake", "Ready"),
        ResourceKind.AGENT: ("Target", "Ready"),
        ResourceKind.RUNNER: ("Connected", "Ready"),
        ResourceKind.POOL: ("Ready",),
        ResourceKind.ROUTE: ("Ready",),
    }.get(kind, ())


def parse_duration(text: str, field: str = "--timeout") -> float:
    """Parses "90s", "5m", "1h", "250ms" or "90" into seconds. Raises INVALID_ARGUMENT naming `field`."""
    found = _DURATION.fullmatch(text)
    seconds = float(found[1]) * _UNIT_SECONDS[found[2]] if found is not None else -1.0
    if not 0 <= seconds <= MAX_TIMEOUT_SECONDS:
        raise invalid_field(field, "must be a time such as 90s, 5m or 1h, at most 168h")
    return seconds


def _wait(target: Target, expectation: Expectation, timeout_seconds: float, home: Path) -> None:
    kind, name = target.kind.value, target.name
    there: Mapping[str, Document] = {}
    deadline = time.monotonic() + timeout_seconds
    if timeout_seconds:
        for state, _ in follow(home, (kind,), deadline=deadline):
            there = state[kind]
            if expectation(_found(there, name)):
                return
    else:
        with connect(home) as mesh:
            there = {document["name"]: document for document in mesh.documents(target.kind)}
        if expectation(_found(there, name)):
            return
    raise _timed_out(target, there, timeout_seconds)


def _found(there: Mapping[str, Document], name: str) -> Document | None:
    """Returns a resource by name or id; None if there is none."""
    return there.get(name) or next((each for each in there.values() if each["status"].get("id") == name), None)


def _timed_out(target: Target, there: Mapping[str, Document], seconds: float) -> WeftError:
    after = f"after {seconds:g} s" if seconds else "now"
    document = _found(there, target.name)
    if document is None:
        missing = unknown_name(target.kind.value, target.name, there)
        return WeftError(Reason.DEADLINE_EXCEEDED, f"{missing.message} ({after})", metadata=missing.metadata)
    state = _state_of(document)
    failing = [one for one in document["status"]["conditions"] if one["status"] != "True"]
    parts = [f"it is {state}"] if state else []
    parts += [f"{one['type']} is {one['status'].lower()}: {one['message']}" for one in failing]
    return WeftError(
        Reason.DEADLINE_EXCEEDED, f"{target} is not there {after}: {'; '.join(parts) or 'its conditions are met'}"
    )


def _state_of(document: Document) -> str:
    """Returns the status of a resource, such as "active"; empty if its kind has none."""
    return str(document["status"].get("state", ""))
