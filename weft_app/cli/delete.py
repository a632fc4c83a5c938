"""`weft delete`: take resources out of the mesh."""

from pathlib import Path
from typing import Annotated

import typer

from weft.client.resources import Registry, connect_registry
from weft.documents.document_base import ResourceKind
from weft.documents.documents import kind_of
from weft.kernel.errors import WeftError, invalid_field
from weft_app.cli.completion import complete_with_tasks
from weft_app.cli.declare import read_files
from weft_app.cli.options import DEFAULT_HOME, HomeOption, exit_code, note, reporting
from weft_app.cli.output import say
from weft_app.cli.targets import Target, is_missing, parse_targets, with_suggestion
from weft_app.cli.tasks import delete_tasks, is_about_tasks


def delete(
    resources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KIND NAME...]",
            help="A kind and names; or KIND/NAME...; also task and ids",
            autocompletion=complete_with_tasks,
        ),
    ] = None,
    files: Annotated[
        list[Path] | None,
        typer.Option("--file", "-f", help="Those that a file declares; - for what comes in.", metavar="FILE"),
    ] = None,
    ignore_not_found: Annotated[
        bool, typer.Option("--ignore-not-found", help="What is not there counts as deleted.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Unload what a live runner has loaded of it, then delete it.")
    ] = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Delete resources, agents and routes first, or tasks that are over. One that fails does not keep the others.

    What a live runner has loaded is not deleted: unload it first, or use --force.

    Example: weft delete agent reviewer
    """
    with reporting():
        if resources and not files and is_about_tasks(resources):
            delete_tasks(resources, home, ignore_not_found=ignore_not_found)
            return
        targets = _targets(resources or [], files or [])
        with connect_registry(home=home) as registry:
            failures = [_delete(registry, target, ignore_not_found, force=force) for target in targets]
        codes = [code for code in failures if code]
        if codes:
            raise typer.Exit(codes[0])


def _targets(words: list[str], files: list[Path]) -> list[Target]:
    if bool(words) == bool(files):
        raise invalid_field("KIND", "name resources, or a file that declares them with -f")
    if files:
        found = [Target(kind_of(one.document), one.document.name) for one in read_files(files)]
    else:
        _, named = parse_targets(words)
        if not named:
            raise invalid_field("NAME", "name what is to be deleted")
        found = list(named)
    # A model that an agent or a route points to cannot be deleted.
    return sorted(found, key=lambda target: target.kind not in (ResourceKind.AGENT, ResourceKind.ROUTE))


def _delete(registry: Registry, target: Target, ignore_not_found: bool, *, force: bool) -> int:
    """Delete one; 0, or the exit code of its failure."""
    try:
        registry.delete(target.kind, target.name, force=force)
    except WeftError as error:
        if is_missing(error) and ignore_not_found:
            return 0
        found = with_suggestion(registry, target, error)
        note(found.message)
        return exit_code(found)
    say(f"{target} deleted\n")
    return 0
