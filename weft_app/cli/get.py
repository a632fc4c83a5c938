"""`weft get`: tables and documents of resources, requests, clients and tasks."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer

from weft.documents.resource_kinds import ResourceKind, listed_kinds
from weft.documents.selectors import Selector, parse_selector
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import NO_REGISTRY
from weft.kernel.unknown_names import unknown_name
from weft_app.cli.columns import MIXED, NOTHING, USES, labelled_listing, listing_of
from weft_app.cli.completion import complete_shown, complete_with_tasks
from weft_app.cli.follow import DELETED, RecordChanges, State, follow
from weft_app.cli.mesh_documents import Document, MeshDocuments, connect_documents
from weft_app.cli.options import (
    DEFAULT_HOME,
    EXIT_OK,
    HomeOption,
    ResourceFormat,
    ResourceOutputOption,
    WatchOption,
    exit_code,
    note,
    reporting,
)
from weft_app.cli.output import TEXTS, say
from weft_app.cli.targets import (
    RECORD_WORDS,
    REQUEST_WORDS,
    TASK_WORDS,
    Scope,
    SelectorOption,
    Target,
    labelled,
    scope_of,
    selected,
    tenants_named,
    whole_kinds,
)

ResourcesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="KIND [NAME...]",
        help=f"{listed_kinds(plural=True)}, and names; or KIND/NAME...; also task and an id",
        autocompletion=complete_with_tasks,
    ),
]
ShownArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="KIND [NAME...]",
        help=f"{listed_kinds(plural=True)} or all, and names; or KIND/NAME..., or NAME; requests, clients, tasks, "
        "secrets, leases, routers",
        autocompletion=complete_shown,
    ),
]


def get(
    resources: ShownArgument,
    output: ResourceOutputOption = ResourceFormat.TABLE,
    watch: WatchOption = False,
    selector: SelectorOption = "",
    states: Annotated[
        list[str] | None,
        typer.Option(
            "--state",
            help="Tasks in this state: pending, running, completed, failed or cancelled; repeatable. Of requests one: "
            "ended, completed, failed or cancelled. Default: running requests.",
        ),
    ] = None,
    caller: Annotated[
        str, typer.Option("--caller", help="Tasks of this caller, such as key:<id> or local; see CALLER in -o wide.")
    ] = "",
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """List resources, requests, clients, tasks, secrets, leases or routers. Resources in YAML can be applied again.

    One kind, several (models,runners or model/qwen runner/box), or all of them, each with its own table. The kind can
    be left out where one kind alone has the name.

    With --watch, each that changes is printed again until Ctrl-C: resources and requests as the mesh reports them, all
    others as they are read once a second.

    Examples: weft get models -o wide; weft get requests -w; weft get all; weft get model/qwen runner/box
    """
    with reporting(interrupted=EXIT_OK if watch else 130):
        word = resources[0].partition("/")[0].lower()
        is_about_requests = resources[0].lower() in REQUEST_WORDS
        if selector and (is_about_requests or word in TASK_WORDS | RECORD_WORDS):
            raise invalid_field("--selector", "goes with models and agents")
        if caller and word not in TASK_WORDS:
            raise invalid_field("--caller", "goes with tasks")
        if states and not is_about_requests and word not in TASK_WORDS:
            raise invalid_field("--state", "goes with tasks and requests")
        # Each kind imports what it needs when it is shown.
        if word in TASK_WORDS:
            from weft_app.cli.tasks import show_tasks  # noqa: PLC0415

            show_tasks(resources, output, states or (), home, caller=caller, watch=watch)
        elif is_about_requests:
            from weft_app.cli.request_table import show_requests  # noqa: PLC0415

            show_requests(resources, output, states or (), home, watch=watch)
        elif word in RECORD_WORDS:
            from weft_app.cli.records import RECORDS  # noqa: PLC0415

            RECORDS[word].show(resources, output, home, watch=watch)
        else:
            _show_resources(resources, selector, output, home, watch=watch)


def _show_resources(words: list[str], selector: str, output: ResourceFormat, home: Path, *, watch: bool) -> None:
    """Prints the resources that `words` name, or those of their kinds that the selector selects."""
    wanted = parse_selector(selector, "--selector")
    try:
        with connect_documents(home) as mesh:
            scope = labelled(scope_of(mesh, words), selector)
            found = None if watch else _found(mesh, scope, wanted, output)
        if found is None:
            _watch(home, scope, output, wanted)
            return
    except WeftError as error:
        if error.reason not in NO_REGISTRY or output not in TEXTS or selector:
            raise
        _show_what_a_router_knows(words, output, home, error, watch=watch)
        return
    if output in TEXTS and (tenants := found.documents.get(ResourceKind.TENANT)):
        from weft_app.cli.limit_uses import limit_uses  # noqa: PLC0415 - of tenants alone

        uses = limit_uses(home)
        for tenant in tenants:
            tenant[USES] = [use for use in uses if use["tenant"] == tenant["name"]]
    if len(scope.kinds) > 1:
        if any(found.documents.values()) or not found.failures:
            _print_kinds(found.documents, output, is_selected=bool(wanted))
        _end_with(found.failures)
        return
    ((kind, documents),) = found.documents.items()
    listing = listing_of(kind)
    if wanted:
        listing = replace(listing, empty=f"no {kind.plural} have the labels {selector}")
    # One that was named is printed without a list around it.
    listing.print(documents, output, (lambda: documents[0]) if len(scope.targets) == 1 else None)
    for line in found.left_out:
        note(line)


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
    """Returns the name of a resource that is named by its name or id. Raises NOT_FOUND."""
    there = state[target.kind.value]
    for name, document in there.items():
        if target.name in (name, document["status"].get("id")):
            return name
    raise unknown_name(target.kind.value, target.name, there)


@dataclass(frozen=True, slots=True)
class _Found:
    """The resources of several kinds, as far as the registry answers."""

    documents: dict[ResourceKind, list[Document]]
    failures: dict[ResourceKind, WeftError]
    """Why there is nothing of a kind."""
    left_out: list[str] = field(default_factory=list)
    """What is served of servers whose models are not all served, in words."""


def _found(mesh: MeshDocuments, scope: Scope, wanted: Selector, output: ResourceFormat) -> _Found:
    """Returns the resources of a scope; of several whole kinds those that can be had, where people read them.

    Raises the first error where nothing can be had.
    """
    found = _Found({}, {})
    is_partial = len(scope.kinds) > 1 and not scope.targets and output in TEXTS
    for place, kind in enumerate(scope.kinds):
        try:
            found.documents[kind] = selected(_documents(mesh, scope, kind), wanted)
        except WeftError as error:
            if not is_partial:
                raise
            if error.reason in NO_REGISTRY:
                # It would not answer for the others either.
                found.failures.update(dict.fromkeys(scope.kinds[place:], error))
                break
            found.failures[kind] = error
    if not found.documents:
        raise next(iter(found.failures.values()))
    if ResourceKind.MODEL in scope.kinds and not scope.targets and output in TEXTS:
        conditions = [each for runner in mesh.documents(ResourceKind.RUNNER) for each in runner["status"]["conditions"]]
        found.left_out.extend(each["message"] for each in conditions if each["type"] == "Served")
    return found


def _show_what_a_router_knows(
    words: list[str], output: ResourceFormat, home: Path, error: WeftError, *, watch: bool
) -> None:
    """Prints what there is of `words` where no registry answers: limits of tenants. Raises `error` for all else."""
    kinds, tenants = whole_kinds(words), tenants_named(words)
    if tenants is None and (watch or ResourceKind.TENANT not in kinds):
        raise error
    from weft_app.cli.limit_uses import KnownUses  # noqa: PLC0415 - as above

    known = KnownUses(home, error, tenants or ())
    if watch:
        known.follow(output)
        return
    known.show(output)
    if others := [kind.plural for kind in kinds if kind is not ResourceKind.TENANT]:
        note(f"not shown: {', '.join(others)}")
        raise typer.Exit(exit_code(error)) from None


def _end_with(failures: Mapping[ResourceKind, WeftError]) -> None:
    """Says which kinds are not shown, and ends the command as failed where there are any."""
    kinds = dict[str, list[str]]()
    for kind, error in failures.items():
        kinds.setdefault(error.message, []).append(kind.plural)
    for message, names in kinds.items():
        note(f"not shown: {', '.join(names)} ({message})")
    if failures:
        raise typer.Exit(exit_code(next(iter(failures.values()))))


def _documents(mesh: MeshDocuments, scope: Scope, kind: ResourceKind) -> list[Document]:
    if not scope.targets:
        return mesh.documents(kind)
    return [mesh.document(kind, target.name) for target in scope.targets if target.kind is kind]


def _print_kinds(found: Mapping[ResourceKind, list[Document]], output: ResourceFormat, *, is_selected: bool) -> None:
    """Prints a table for each kind of which there are resources, with KIND/NAME in it; else one list of all."""
    everything = [document for documents in found.values() for document in documents]
    if output not in TEXTS:
        MIXED.print(everything, output)
    elif not everything:
        note("nothing has such labels" if is_selected else NOTHING)
    else:
        tables = (labelled_listing(kind).text(documents, output) for kind, documents in found.items() if documents)
        say("\n".join(tables))
