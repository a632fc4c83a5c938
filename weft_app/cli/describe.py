"""`weft describe`: everything known about one resource."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.documents.resource_kinds import ResourceKind, listed_kinds
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import NO_REGISTRY
from weft.kernel.values.names import AGENT_PREFIX, ROUTE_PREFIX, WORKFLOW_PREFIX
from weft_app.cli.columns import graph_bytes, listing_of, shown_state, who_wakes
from weft_app.cli.completion import complete_described
from weft_app.cli.extension_commands import kinds_off_here
from weft_app.cli.mesh_api import Document, MeshApi, connect
from weft_app.cli.options import DEFAULT_HOME, HomeOption, OutputFormat, PageOutputOption
from weft_app.cli.output import (
    Column,
    ago,
    block,
    custom_columns,
    formatted,
    moment_in,
    page,
    print_document,
    seconds_ago,
    table_block,
)
from weft_app.cli.records import LIMIT_USES, known_uses, limit_uses, note_missing_declarations
from weft_app.cli.targets import one_named, record_kind, tenants_named
from weft_app.cli.terminal import safe_text, say

_REQUESTED_AS: Mapping[str, str] = {
    ResourceKind.MODEL: "",
    ResourceKind.POOL: "",
    ResourceKind.AGENT: AGENT_PREFIX,
    ResourceKind.ROUTE: ROUTE_PREFIX,
    ResourceKind.WORKFLOW: WORKFLOW_PREFIX,
}
"""Prefix of a kind's names in requests."""
LOG_LINES = 10
EVENTS = 10
_KINDS = listed_kinds(plural=False, off=kinds_off_here())


def describe(
    resources: Annotated[
        list[str],
        typer.Argument(
            metavar="[KIND] NAME",
            help=f"A {_KINDS}, request or task: KIND NAME, KIND/NAME or NAME.",
            autocompletion=complete_described,
        ),
    ],
    output: PageOutputOption = OutputFormat.TABLE,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Show the details of one resource: its document, conditions with reasons, engines and recent events.

    With -o json or yaml: the resource, its events, and its runner's own description.

    The kind can be omitted if only one kind has the name.

    Example: weft describe model qwen
    """
    kind, _, name = resources[0].partition("/")
    if record_kind(kind) == "task":
        from weft_app.cli.tasks import describe_task  # noqa: PLC0415 - tasks are read over gRPC

        describe_task(resources, output, home)
    elif record_kind(kind) == "request":
        from weft_app.cli.explain import show_request  # noqa: PLC0415 - as tasks

        names = [*filter(None, [name]), *resources[1:]]
        if len(names) != 1:
            raise invalid_field("ID", "name one request, as request ID or request/ID")
        show_request(names[0], output, home)
    else:
        _describe_resource(resources, output, home)


def _describe_resource(words: list[str], output: OutputFormat, home: Path) -> None:
    is_page = output is OutputFormat.TABLE
    try:
        with connect(home) as mesh:
            target = one_named(mesh, words)
            document = mesh.document(target.kind, target.name)
            events = mesh.events(target.kind, document["name"], EVENTS)
            instances = _instances(mesh, document)
            users = _users(mesh, document) if is_page else []
    except WeftError as error:
        tenants = tenants_named(words)
        if error.reason not in NO_REGISTRY or not is_page or tenants is None or len(tenants) != 1:
            raise
        if not (known := known_uses(home, error, tenants)):
            raise
        note_missing_declarations(error)
        lines = (*page((Column("Name", "tenant"),), known[0]), *table_block("Used", LIMIT_USES, known))
        say("".join(f"{line}\n" for line in lines))
        return
    is_tenant = target.kind is ResourceKind.TENANT
    uses = limit_uses(home, {document["name"]}) if is_tenant else []
    if is_page:
        used = "".join(f"{line}\n" for line in table_block("Used", LIMIT_USES, uses))
        say(description(document, events, instances, users) + used)
        return
    runner = None if instances is None else {"instances": instances}
    whole = {"resource": document, "events": events, "runner": runner}
    print_document(whole | ({"uses": uses} if is_tenant else {}), output)


def _users(mesh: MeshApi, document: Document) -> list[Document]:
    """Returns the agents, routes and aliases that refer to a resource; omits kinds that cannot be read."""
    found: list[Document] = []
    if document["kind"] in _REQUESTED_AS:
        for kind in (ResourceKind.AGENT, ResourceKind.ROUTE, ResourceKind.ALIAS):
            with suppress(WeftError):
                found += (each for each in mesh.documents(kind) if _leads_to(each, document))
    return found


def _leads_to(user: Document, document: Document) -> bool:
    name = document["name"]
    if user["kind"] == ResourceKind.ALIAS:
        return bool(user["target"] == _REQUESTED_AS[document["kind"]] + name)
    if _REQUESTED_AS[document["kind"]]:
        return False
    names = {name, document["status"].get("pool", name)}
    if user["kind"] == ResourceKind.ROUTE:
        return not names.isdisjoint(user["candidates"])
    return user.get("pool") in names or user.get("model") in {name, *document.get("members", ())}


def _instances(mesh: MeshApi, document: Document) -> list[Document] | None:
    """Returns the runner's engine descriptions for a document; None if there is no runner or it does not answer."""
    kind = document["kind"]
    runner = document["name"] if kind == ResourceKind.RUNNER else document["status"].get("runner")
    if not runner or kind not in (ResourceKind.RUNNER, ResourceKind.MODEL):
        return None
    with suppress(WeftError):
        return list(mesh.get(f"/v1/admin/runners/{runner}/instances", lines=LOG_LINES)["instances"])
    return None


_EVENTS = (Column("AGE", "time", "ago"), Column("REASON", "reason"), Column("MESSAGE", "message"))
_CONDITIONS = (Column("TYPE", "type"), Column("STATUS", "status"), *_EVENTS[1:])
_TITLE = (
    *custom_columns("Name:name Kind:kind"),
    Column("Status", lambda found: (shown_state(found) if "state" in found["status"] else "") or None),
)
MAX_TITLE_CHARS = 24
_SHORTER: Mapping[str, Callable[[Document], Any]] = {
    # Recipes may contain secrets.
    "wake": who_wakes,
    "graph": lambda workflow: f"{graph_bytes(workflow)} bytes",
}
"""Short texts in place of values."""
_MAPS = frozenset({"labels", "defaultParams"})
"""Objects with user-defined keys."""
_TIMES = ("At", "Since", "Time")
MAX_ROWS = 10
_FORMS = (("Seconds", "{:g} s"), ("Bytes", "size"))
"""Formats of numbers by key suffix."""
_ELSEWHERE = frozenset({"kind", "name", "state", "status", "conditions", "instance", "instances"})
"""Keys that are shown elsewhere on the page."""


def description(
    document: Document,
    events: Sequence[Document],
    described: Sequence[Document] | None,
    users: Sequence[Document] = (),
) -> str:
    """Returns a resource as text. `described` has its runner's engine descriptions; None: unknown.

    `users`: the resources that refer to it.
    """
    status = document["status"]
    facts = _rest(document) | _rest(status)
    facts |= {key: shorter(document) for key, shorter in _SHORTER.items() if key in document}
    lines = [*page(_TITLE, document), *_facts(facts)]
    lines += table_block("Conditions", _CONDITIONS, status["conditions"])
    for instance in [status["instance"]] if "instance" in status else status.get("instances", ()):
        own = {"process": "its runner cannot be reached"}
        if described is not None:
            own = next((each for each in described if each["model"] == instance["model"]), {})
        lines += block(f"Instance {instance['model']}", _facts(instance | own))
    for word in dict.fromkeys(each["kind"] for each in users):
        kind, rows = ResourceKind(word), [each for each in users if each["kind"] == word]
        lines += table_block(kind.plural.capitalize(), listing_of(kind).columns, rows)
    lines += table_block("Events", _EVENTS, events) if events else ["Events:       none"]
    return "\n".join(lines) + "\n"


def _rest(document: Document) -> Document:
    return {key: value for key, value in document.items() if key not in _ELSEWHERE}


def _facts(document: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line per value of a document; indents nested objects, multi-line texts and lists."""
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
    """Returns a key as words, such as "Context tokens"."""
    words = "".join(f" {each.lower()}" if each.isupper() else each for each in key.replace("_", " "))
    return words[:1].upper() + words[1:]


def _text(key: str, value: Any) -> str | None:
    """Returns a value as text; None if there is nothing to show."""
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
