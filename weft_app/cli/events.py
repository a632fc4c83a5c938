"""`weft events`: recent events."""

from pathlib import Path
from typing import Annotated

import typer

from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.values.unknown_names import unknown_name
from weft_app.cli.columns import EVENTS
from weft_app.cli.completion import complete_resource
from weft_app.cli.follow import follow_events
from weft_app.cli.mesh_api import connect
from weft_app.cli.options import (
    DEFAULT_HOME,
    EXIT_OK,
    HomeOption,
    ResourceFormat,
    ResourceOutputOption,
    WatchOption,
    reporting,
)
from weft_app.cli.output import Feed
from weft_app.cli.targets import MISSING, parse_targets
from weft_app.cli.terminal import note, say

MAX_PAST_EVENTS = 1000


def events(
    resources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KIND [NAME]]", help="Only events of this kind or resource.", autocompletion=complete_resource
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option("--tail", "-n", "--limit", min=1, max=MAX_PAST_EVENTS, help="Number of newest events.")
    ] = 100,
    output: ResourceOutputOption = ResourceFormat.TABLE,
    watch: WatchOption = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Show recent events, oldest first.

    Example: weft events model qwen -w
    """
    with reporting(interrupted=EXIT_OK if watch else 130):
        kind, name = _scope(resources or [])
        if watch:
            name = _known_name(kind, name, home)
            feed = Feed(EVENTS, output)
            say(feed.first(()))
            for event in follow_events(home, kind.value if kind else "", name, limit):
                say(feed.row(event))
        with connect(home) as mesh:
            found = mesh.events(kind, name, limit)
            if kind is not None and name and not found and name not in (names := set(mesh.names(kind))):
                # A deleted resource has events, but its name is unknown.
                raise unknown_name(kind.value, name, names)
        EVENTS.print(found, output, lambda: {"kind": "EventList", "items": found})


def _scope(words: list[str]) -> tuple[ResourceKind | None, str]:
    if not words:
        return None, ""
    kind, targets = parse_targets(words)
    if len(targets) > 1:
        raise invalid_field("NAME", "name one resource, or only a kind")
    return kind, targets[0].name if targets else ""


def _known_name(kind: ResourceKind | None, name: str, home: Path) -> str:
    """Returns the name for a name or an id. If nothing has it yet, prints a note: it may be created later."""
    if kind is None or not name:
        return name
    with connect(home) as mesh:
        try:
            return str(mesh.document(kind, name)["name"])
        except WeftError as error:
            if error.reason not in MISSING:
                raise
            note(error.message)
            return name
