"""`weft get`: what there is in the mesh."""

from pathlib import Path
from typing import Annotated, Any

import typer

from weft.client.resources import connect_registry
from weft.documents.document_base import ResourceKind
from weft.documents.documents import Document
from weft.documents.mesh_state import Key, MeshState
from weft.documents.yaml_nodes import declared, plain, to_yaml, yaml_text
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason
from weft_app.cli.columns import columns_of, label
from weft_app.cli.completion import complete_shown, complete_with_tasks
from weft_app.cli.follow import follow_resources
from weft_app.cli.options import (
    DEFAULT_HOME,
    EXIT_OK,
    HomeOption,
    ResourceFormat,
    ResourceOutputOption,
    WatchOption,
    reporting,
)
from weft_app.cli.output import TextTable, json_line, json_text, say
from weft_app.cli.requests import is_about_requests
from weft_app.cli.requests import show as show_requests
from weft_app.cli.targets import Target, find, parse_targets
from weft_app.cli.tasks import is_about_tasks, show_tasks

ResourcesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="KIND [NAME...]",
        help="models, agents, runners, pools or routes, and names; or KIND/NAME...; also task and an id",
        autocompletion=complete_with_tasks,
    ),
]
ShownArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="KIND [NAME...]",
        help="models, agents, runners, pools or routes, and names; or KIND/NAME...; also requests, clients and tasks",
        autocompletion=complete_shown,
    ),
]


def get(
    resources: ShownArgument,
    output: ResourceOutputOption = ResourceFormat.TABLE,
    watch: WatchOption = False,
    states: Annotated[
        list[str] | None,
        typer.Option(
            "--state", help="Tasks in this state: pending, running, completed, failed or cancelled; repeatable."
        ),
    ] = None,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """List resources, or what a router remembers and keeps. As YAML resources can be applied again.

    Example: weft get models -o wide
    """
    with reporting(interrupted=EXIT_OK if watch else 130):
        if is_about_tasks(resources):
            if watch:
                raise invalid_field("--watch", "goes with resources; `weft logs task/ID -f` follows one task")
            show_tasks(resources, output, states or (), home)
            return
        if states:
            raise invalid_field("--state", "goes with tasks")
        if is_about_requests(resources):
            if watch:
                raise invalid_field("--watch", "goes with resources; a request's own stream says how it fares")
            show_requests(resources, output, home)
            return
        kind, targets = parse_targets(resources)
        if any(target.kind is not kind for target in targets):
            raise invalid_field("KIND", "resources of one kind can be shown at a time")
        if watch:
            ResourceWatch(kind, targets, output).run(home)
            return
        with connect_registry(home=home) as registry:
            found = [find(registry, target) for target in targets] if targets else registry.documents(kind)
        single = len(targets) == 1
        say(render(kind, found, output, single=single))


def render(kind: ResourceKind, documents: list[Document], output: ResourceFormat, *, single: bool) -> str:
    """Resources as text; `single` is one that was asked for by name, which is no list."""
    match output:
        case ResourceFormat.JSON if single:
            return json_text(plain(documents[0]))
        case ResourceFormat.JSON:
            return json_text({"kind": kind.list_kind, "items": [plain(document) for document in documents]})
        case ResourceFormat.YAML:
            return to_yaml(documents) or f"# there are no {kind.plural}\n"
        case ResourceFormat.NAME:
            return "".join(f"{label(document)}\n" for document in documents)
        case _:
            return TextTable(columns_of(kind, wide=output is ResourceFormat.WIDE)).text(documents)


class ResourceWatch:
    """Shows resources of one kind, then each one that changes."""

    def __init__(self, kind: ResourceKind, targets: tuple[Target, ...], output: ResourceFormat) -> None:
        self._kind = kind
        self._names = frozenset(target.name for target in targets)
        self._output = output
        self._table = TextTable(columns_of(kind, wide=output is ResourceFormat.WIDE))
        self._shown: dict[str, Any] = {}

    def run(self, home: Path) -> None:
        """Until Ctrl-C."""
        following = follow_resources(home)
        state, _ = next(following)
        self._begin(state)
        for state, changed in following:
            self.show(state, changed)

    def _begin(self, state: MeshState) -> None:
        documents = [document for document in state.documents(self._kind) if self._is_wanted(document.name)]
        missing = self._names - {document.name for document in documents}
        if missing:
            raise WeftError(Reason.NOT_FOUND, f"there is no {self._kind.value}/{min(missing)}")
        self._shown = {document.name: self._fingerprint(document) for document in documents}
        if self._output in (ResourceFormat.TABLE, ResourceFormat.WIDE):
            say(self._table.text(documents))
        else:
            say("".join(self._row(document) for document in documents))

    def show(self, state: MeshState, changed: frozenset[Key]) -> None:
        """Print those of `changed` that look different now."""
        for name in sorted(name for kind, name in changed if kind is self._kind and self._is_wanted(name)):
            document = state.document((self._kind, name))
            if document is None:
                if self._shown.pop(name, None) is not None:
                    say(self._farewell(name))
                continue
            fingerprint = self._fingerprint(document)
            if self._shown.get(name) != fingerprint:
                self._shown[name] = fingerprint
                say(self._row(document))

    def _is_wanted(self, name: str) -> bool:
        return not self._names or name in self._names

    def _fingerprint(self, document: Document) -> Any:
        match self._output:
            case ResourceFormat.JSON | ResourceFormat.NAME:
                told = plain(document)
                told["status"].pop("lastHeartbeatAt", None)
                return told
            case ResourceFormat.YAML:
                return declared(document)
            case _:
                return self._table.fingerprint(document)

    def _row(self, document: Document) -> str:
        match self._output:
            case ResourceFormat.JSON:
                return json_line(plain(document))
            case ResourceFormat.YAML:
                return "---\n" + yaml_text(declared(document))
            case ResourceFormat.NAME:
                return f"{label(document)}\n"
            case _:
                return self._table.line(self._table.cells(document))

    def _farewell(self, name: str) -> str:
        match self._output:
            case ResourceFormat.JSON:
                return json_line({"kind": self._kind.value, "name": name, "deleted": True})
            case ResourceFormat.YAML:
                return f"# {self._kind.value}/{name} is deleted\n"
            case ResourceFormat.NAME:
                return f"{self._kind.value}/{name}\n"
            case _:
                return self._table.line(self._farewell_cells(name))

    def _farewell_cells(self, name: str) -> list[str]:
        titles = [column.title for column in columns_of(self._kind, wide=self._output is ResourceFormat.WIDE)]
        told_in = titles.index("STATUS") if "STATUS" in titles else 1
        return [name, *("deleted" if place == told_in else "-" for place in range(1, len(titles)))]
