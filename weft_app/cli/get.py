"""`weft get`: tables and documents of resources, requests, clients and tasks."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from weft.documents.resource_kinds import ResourceKind, listed_kinds
from weft.documents.selectors import Selector, parse_selector
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import NO_REGISTRY, Reason
from weft.kernel.values.unknown_names import unknown_name
from weft_app.cli.columns import MIXED, NOTHING, USES, labelled_listing, listing_of
from weft_app.cli.completion import complete_shown, complete_with_tasks
from weft_app.cli.extension_commands import kinds_off_here
from weft_app.cli.follow import DELETED, RecordChanges, State, follow, poll_records
from weft_app.cli.mesh_api import Document, MeshApi, connect
from weft_app.cli.options import (
    DEFAULT_HOME,
    EXIT_OK,
    HomeOption,
    ResourceFormat,
    ResourceOutputOption,
    WatchOption,
    exit_code,
    reporting,
)
from weft_app.cli.output import TEXTS
from weft_app.cli.records import (
    LIMIT_WINDOWS,
    RECORDS,
    known_uses,
    limit_uses,
    note_missing_declarations,
    read_uses,
    show_requests,
)
from weft_app.cli.targets import (
    Scope,
    SelectorOption,
    Target,
    labelled,
    record_kind,
    scope_of,
    selected,
    tenants_named,
    whole_kinds,
)
from weft_app.cli.terminal import note, say

_KINDS = listed_kinds(plural=True, off=kinds_off_here())
ResourcesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="KIND [NAME...]",
        help=f"{_KINDS}, and names; or KIND/NAME...; also task and an id",
        autocompletion=complete_with_tasks,
    ),
]


def get(
    resources: Annotated[
        list[str],
        typer.Argument(
            metavar="KIND [NAME...]",
            help=f"{_KINDS} or all, and names; or KIND/NAME..., or NAME; requests, clients, tasks, "
            "secrets, leases, routers",
            autocompletion=complete_shown,
        ),
    ],
    output: ResourceOutputOption = ResourceFormat.TABLE,
    watch: WatchOption = False,
    selector: SelectorOption = "",
    states: Annotated[
        list[str] | None,
        typer.Option(
            "--state",
            help="Tasks in this state: pending, running, completed, failed or cancelled; repeatable. For requests, "
            "one of: ended, completed, failed or cancelled. Default: running requests.",
        ),
    ] = None,
    caller: Annotated[
        str, typer.Option(help="Tasks of this caller, such as key:<id> or local; see CALLER in -o wide.")
    ] = "",
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """List resources, requests, clients, tasks, secrets, leases or routers. Resources in YAML can be applied again.

    One kind, several (models,runners or model/qwen runner/box), or all of them, each with its own table. The kind can
    be omitted if only one kind has the name.

    With --watch, each item that changes is printed again until Ctrl-C. Resources and requests are reported by the mesh;
    other kinds are read once a second.

    Examples: weft get models -o wide; weft get requests -w; weft get all; weft get model/qwen runner/box
    """
    with reporting(interrupted=EXIT_OK if watch else 130):
        record = record_kind(resources[0])
        is_about_requests = record == "request" and "/" not in resources[0]
        if selector and (is_about_requests or record == "task" or record in RECORDS):
            raise invalid_field("--selector", "goes with models, agents and routes")
        if caller and record != "task":
            raise invalid_field("--caller", "goes with tasks")
        if states and not is_about_requests and record != "task":
            raise invalid_field("--state", "goes with tasks and requests")
        if record == "task":
            from weft_app.cli.tasks import show_tasks  # noqa: PLC0415 - of tasks alone

            show_tasks(resources, output, states or (), home, caller=caller, watch=watch)
        elif is_about_requests:
            show_requests(resources, output, states or (), home, watch=watch)
        elif record in RECORDS:
            RECORDS[record].show(resources, output, home, watch=watch)
        else:
            _show_resources(resources, selector, output, home, watch=watch)


def _show_resources(words: list[str], selector: str, output: ResourceFormat, home: Path, *, watch: bool) -> None:
    """Prints the resources named in `words`, or those of their kinds that match the selector."""
    wanted = parse_selector(selector, "--selector")
    found: dict[ResourceKind, list[Document]] = {}
    failures: dict[ResourceKind, WeftError] = {}
    left_out: list[str] = []
    try:
        with connect(home) as mesh:
            scope = labelled(scope_of(mesh, words), selector)
            if not watch:
                found, failures = _found(mesh, scope, wanted, output)
                left_out = _left_out(mesh, scope, output)
        if watch:
            _watch(home, scope, output, wanted)
            return
    except WeftError as error:
        if error.reason not in NO_REGISTRY or output not in TEXTS or selector:
            raise
        _show_what_a_router_knows(words, output, home, error, watch=watch)
        return
    if output in TEXTS and found.get(ResourceKind.TENANT):
        _add_uses(found[ResourceKind.TENANT], home)
    if len(scope.kinds) > 1:
        if any(found.values()) or not failures:
            _print_kinds(found, output, is_selected=bool(wanted))
        _end_with(failures)
        return
    ((kind, documents),) = found.items()
    listing = listing_of(kind)
    if wanted:
        listing = replace(listing, empty=f"no {kind.plural} match the labels {selector}")
    # A single named resource is printed without a list around it.
    listing.print(documents, output, (lambda: documents[0]) if len(scope.targets) == 1 else None)
    for line in left_out:
        note(line)


def _add_uses(tenants: list[Document], home: Path) -> None:
    uses = limit_uses(home)
    for tenant in tenants:
        tenant[USES] = [use for use in uses if use["tenant"] == tenant["name"]]


def _watch(home: Path, scope: Scope, output: ResourceFormat, selector: Selector) -> None:
    """Prints the resources of a scope, then each one that changes, until Ctrl-C."""
    is_alone = len(scope.kinds) == 1
    printed = {
        kind.value: RecordChanges(
            listing_of(kind) if is_alone else labelled_listing(kind), output, gone=DELETED, has_header=is_alone
        )
        for kind in scope.kinds
    }
    names = frozenset[tuple[str, str]]()
    for state, changed in follow(home, tuple(printed)):
        if scope.targets and not names:
            names = frozenset((target.kind.value, _known_name(state, target)) for target in scope.targets)
        for kind in dict.fromkeys(kind for kind, _ in changed) if names or not scope.targets else ():
            there = state[kind].values()
            wanted = [each for each in there if not names or (kind, each["name"]) in names]
            printed[kind].all(sorted(selected(wanted, selector), key=lambda each: str(each["name"])))


def _known_name(state: State, target: Target) -> str:
    """Returns the name of a resource by its name or id. Raises NOT_FOUND."""
    there = state[target.kind.value]
    for name, document in there.items():
        if target.name in (name, document["status"].get("id")):
            return name
    raise unknown_name(target.kind.value, target.name, there)


def _found(
    mesh: MeshApi, scope: Scope, wanted: Selector, output: ResourceFormat
) -> tuple[dict[ResourceKind, list[Document]], dict[ResourceKind, WeftError]]:
    """Returns the resources of a scope, and the errors of kinds that cannot be read.

    Only tables of several whole kinds show the readable ones. Raises the first error if nothing can be read.
    """
    found: dict[ResourceKind, list[Document]] = {}
    failures: dict[ResourceKind, WeftError] = {}
    for index, kind in enumerate(scope.kinds):
        named = [target.name for target in scope.targets if target.kind is kind]
        try:
            documents = [mesh.document(kind, name) for name in named] if scope.targets else mesh.documents(kind)
        except WeftError as error:
            if error.reason is Reason.NOT_FOUND and len(scope.kinds) > 1 and not scope.targets:
                continue  # the mesh has no such kind: its extension is off
            if len(scope.kinds) == 1 or scope.targets or output not in TEXTS:
                raise
            # An unreachable registry would fail for the others, too.
            failures.update(dict.fromkeys(scope.kinds[index:] if error.reason in NO_REGISTRY else (kind,), error))
            if error.reason in NO_REGISTRY:
                break
        else:
            found[kind] = selected(documents, wanted)
    if not found:
        raise next(iter(failures.values()))
    return found, failures


def _left_out(mesh: MeshApi, scope: Scope, output: ResourceFormat) -> list[str]:
    """Returns for lists of models the servers with models that are not all served, as text."""
    if scope.kinds != (ResourceKind.MODEL,) or scope.targets or output not in TEXTS:
        return []
    conditions = [each for runner in mesh.documents(ResourceKind.RUNNER) for each in runner["status"]["conditions"]]
    return [each["message"] for each in conditions if each["type"] == "Served"]


def _show_what_a_router_knows(
    words: list[str], output: ResourceFormat, home: Path, error: WeftError, *, watch: bool
) -> None:
    """Prints the limits of tenants in `words` without a registry. Raises `error` for other words."""
    kinds, tenants = whole_kinds(words), tenants_named(words)
    if tenants is None and (watch or ResourceKind.TENANT not in kinds):
        raise error
    first = known_uses(home, error, tenants or ())
    if watch:
        note_missing_declarations(error, "; not waiting for the registry")
        poll_records(LIMIT_WINDOWS, output, lambda: read_uses(home, tenants or ()))
        return
    LIMIT_WINDOWS.print(first, output)
    note_missing_declarations(error)
    if others := [kind.plural for kind in kinds if kind is not ResourceKind.TENANT]:
        note(f"not shown: {', '.join(others)}")
        raise typer.Exit(exit_code(error)) from None


def _end_with(failures: Mapping[ResourceKind, WeftError]) -> None:
    """Prints which kinds are not shown, and fails the command if there are any."""
    kinds = dict[str, list[str]]()
    for kind, error in failures.items():
        kinds.setdefault(error.message, []).append(kind.plural)
    for message, names in kinds.items():
        note(f"not shown: {', '.join(names)} ({message})")
    if failures:
        raise typer.Exit(exit_code(next(iter(failures.values()))))


def _print_kinds(found: Mapping[ResourceKind, list[Document]], output: ResourceFormat, *, is_selected: bool) -> None:
    """Prints a table per kind with resources, with KIND/NAME in it, or a single list of all."""
    everything = [document for documents in found.values() for document in documents]
    if output not in TEXTS:
        MIXED.print(everything, output)
    elif not everything:
        note("nothing matches these labels" if is_selected else NOTHING)
    else:
        tables = (labelled_listing(kind).text(documents, output) for kind, documents in found.items() if documents)
        say("\n".join(tables))
