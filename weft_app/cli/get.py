"""`weft get`: tables and documents of resources, requests, clients and tasks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.api.router.v1.request_pb2 import RequestRecord
from weft.api.router.v1.request_service_pb2 import ListClientsResponse, ListRequestsResponse
from weft.client.requests import Requests, connect_requests
from weft.client.resources import connect_registry
from weft.documents.codec import document_of, word_of
from weft.documents.mesh_state import Key, MeshState
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import AnyDocument, declared, plain
from weft.documents.selectors import Selector
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason
from weft_app.cli.columns import RESOURCES
from weft_app.cli.completion import complete_shown, complete_with_tasks
from weft_app.cli.follow import follow_resources
from weft_app.cli.options import (
    DEFAULT_HOME,
    EXIT_OK,
    HomeOption,
    ResourceFormat,
    ResourceOutputOption,
    WatchOption,
    naming_fields,
    reporting,
)
from weft_app.cli.output import Column, Feed, Listing, json_line, say
from weft_app.cli.secrets import is_about_secrets, show_secrets
from weft_app.cli.targets import (
    CLIENT_WORDS,
    REQUEST_WORDS,
    SelectorOption,
    Target,
    find,
    parse_targets,
    selected,
    selector_of,
)
from weft_app.cli.tasks import is_about_tasks, show_tasks

MAX_SHOWN = 1_000


_REQUEST = (
    Column("REQUEST", "{request_id}"),
    Column("TARGET", "{target}"),
    Column("STATE", "{state}"),
    Column("TENANT", "{tenant}"),
    Column("PRIORITY", "{priority}"),
    Column("POSITION", lambda request: str(request.queued.position) if request.HasField("queued") else None),
    Column("ETA", "[{queued.eta:.0f}s|{loading.eta:.0f}s]", ticks=True),
    Column("AGE", "[{arrive_time:age}]", ticks=True),
    Column("AWAITS", "[{queued.reason:short}|{loading.stage:short}]"),
)
_REQUESTS = Listing(
    columns=_REQUEST,
    wide=(*_REQUEST[:-1], Column("CLIENT", "{client_id}"), Column("AWAITS", "[{queued.reason}|{loading.stage}]")),
    name=lambda request: request.request_id,
)
_END = (
    Column("REQUEST", "{request_id}"),
    Column("TARGET", "{target}"),
    Column("OUTCOME", lambda request: word_of(request, "reason") if request.reason else "completed"),
    Column("TENANT", "{tenant}"),
    Column("PRIORITY", "{priority}"),
    Column("TOKENS", "[{receipt.usage.prompt_tokens}+{receipt.usage.completion_tokens}]"),
    Column("TOOK", lambda request: f"{_seconds_of(request):.3g}s"),
    Column("ENDED", "[{end_time:ago}]", ticks=True),
)
_ENDED = Listing(
    columns=_END,
    wide=(*_END, Column("CLIENT", "{client_id}"), Column("MESSAGE", "[{message}]")),
    name=lambda request: request.request_id,
)


def _seconds_of(request: RequestRecord) -> float:
    return (request.end_time.ToNanoseconds() - request.arrive_time.ToNanoseconds()) / 1e9


_CLIENT = (
    Column("CLIENT", "{client_id}"),
    Column("PROFILE", "{has_profile:yes}"),
    Column("PRIORITY", "{default_priority}"),
    Column("REQUESTS", "{request_count}"),
    Column("REFUSED", "{refused_count}"),
    Column("RUNNING", "{running_count}"),
    Column("TOKENS", "{token_count}"),
    Column("EVERY", "[{usual_interval:.3g}s]"),
    Column("SEEN", "[{last_seen_time:ago}]", ticks=True),
    Column("COOLDOWN", lambda client: "yes" if client.HasField("cooldown_end_time") else "-"),
)
_CLIENT_WIDE = (
    *_CLIENT,
    Column("ROUTE", "{route}"),
    Column("ASKS FOR", lambda client: ",".join(f"{one.target}={one.request_count}" for one in client.targets) or "-"),
)
_CLIENTS = Listing(columns=_CLIENT, wide=_CLIENT_WIDE, name=lambda client: client.client_id)


def is_about_requests(words: Sequence[str]) -> bool:
    """Whether the first argument of `weft get` names requests or clients."""
    return words[0].lower() in REQUEST_WORDS | CLIENT_WORDS


def show_requests(words: Sequence[str], output: ResourceFormat, states: Sequence[str], home: Path) -> None:
    """Prints the requests or clients that `words` name; without names, those of the state, or all clients."""
    names, is_requests = words[1:], words[0].lower() in REQUEST_WORDS
    if states and (names or not is_requests or len(states) > 1):
        raise invalid_field("--state", "of requests is one, and goes without names")
    with connect_requests(home=home) as requests:
        found = _requests(requests, names, *states) if is_requests else _clients(requests, names)
    if output is ResourceFormat.YAML:
        raise invalid_field("--output", "must be table, wide, json or name: requests and clients are not declared")
    if isinstance(found, ListClientsResponse):
        _CLIENTS.print(found.clients, output, lambda: document_of(found))
        return
    (_ENDED if states else _REQUESTS).print(found.requests, output, lambda: document_of(found))
    left = found.total_count - len(found.requests)
    if left > 0 and output in (ResourceFormat.TABLE, ResourceFormat.WIDE):
        say(f"and {left} more\n")


def _requests(requests: Requests, names: Sequence[str], state: str = "") -> ListRequestsResponse:
    if state:
        with naming_fields(lambda field: f"--{field}"):
            return requests.ended(MAX_SHOWN, state)
    if not names:
        return requests.under_way(MAX_SHOWN)
    found = [requests.get(name) for name in names]
    return ListRequestsResponse(requests=found, total_count=len(found))


def _clients(requests: Requests, names: Sequence[str]) -> ListClientsResponse:
    found = requests.clients().clients
    missing = set(names) - {client.client_id for client in found}
    if missing:
        raise WeftError(Reason.NOT_FOUND, f"no client {min(missing)} was seen lately; `weft get clients` lists them")
    return ListClientsResponse(clients=[client for client in found if not names or client.client_id in names])


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
        help="models, agents, runners, pools or routes, and names; or KIND/NAME...; requests, clients, tasks, secrets",
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
    """List resources, requests, clients, tasks or secrets. Resources printed as YAML can be applied again.

    Example: weft get models -o wide
    """
    with reporting(interrupted=EXIT_OK if watch else 130):
        if selector and (is_about_tasks(resources) or is_about_secrets(resources) or is_about_requests(resources)):
            raise invalid_field("--selector", "goes with models and agents")
        if caller and not is_about_tasks(resources):
            raise invalid_field("--caller", "goes with tasks")
        if is_about_tasks(resources):
            if watch:
                raise invalid_field("--watch", "goes with resources; `weft logs task/ID -f` follows one task")
            show_tasks(resources, output, states or (), home, caller=caller)
            return
        if is_about_secrets(resources):
            if watch:
                raise invalid_field("--watch", "goes with resources")
            show_secrets(resources, output, home)
            return
        if is_about_requests(resources):
            if watch:
                raise invalid_field("--watch", "goes with resources; a request's own stream says how it fares")
            show_requests(resources, output, states or (), home)
            return
        if states:
            raise invalid_field("--state", "goes with tasks and requests")
        _show_resources(resources, selector, output, home, watch=watch)


def _show_resources(words: list[str], selector: str, output: ResourceFormat, home: Path, *, watch: bool) -> None:
    """Prints the resources that `words` name, or those of a kind that the selector selects."""
    kind, targets = parse_targets(words)
    wanted = selector_of(selector, kind)
    if any(target.kind is not kind for target in targets):
        raise invalid_field("KIND", "resources of one kind can be shown at a time")
    if watch:
        ResourceWatch(kind, targets, output, wanted).run(home)
        return
    with connect_registry(home=home) as registry:
        found = [find(registry, target) for target in targets] if targets else registry.documents(kind)
    found = selected(found, wanted)
    # One that was named is printed without a list around it.
    RESOURCES[kind].print(found, output, (lambda: plain(found[0])) if len(targets) == 1 else None)


class ResourceWatch:
    """Prints resources of one kind, then each one that changes."""

    def __init__(
        self, kind: ResourceKind, targets: tuple[Target, ...], output: ResourceFormat, selector: Selector = ()
    ) -> None:
        self._kind = kind
        self._selector = selector
        self._names = frozenset(target.name for target in targets)
        self._output = output
        self._feed = Feed(RESOURCES[kind], output)
        self._shown: dict[str, Any] = {}

    def run(self, home: Path) -> None:
        """Prints until Ctrl-C."""
        following = follow_resources(home)
        state, _ = next(following)
        self._begin(state)
        for state, changed in following:
            self.show(state, changed)

    def _begin(self, state: MeshState) -> None:
        named = {name: document for name in self._names if (document := state.document((self._kind, name))) is not None}
        # Ids are names from here on.
        self._names = frozenset(named[name].name if name in named else name for name in self._names)
        documents = [document for document in state.documents(self._kind) if self._is_wanted(document.name)]
        missing = self._names - {document.name for document in documents}
        if missing:
            raise WeftError(Reason.NOT_FOUND, f"there is no {self._kind.value}/{min(missing)}")
        documents = selected(documents, self._selector)
        self._shown = {document.name: self._fingerprint(document) for document in documents}
        say(self._feed.first(documents))

    def show(self, state: MeshState, changed: frozenset[Key]) -> None:
        """Prints those of `changed` whose row differs from the last one printed."""
        for name in sorted(name for kind, name in changed if kind is self._kind and self._is_wanted(name)):
            document = state.document((self._kind, name))
            if document is None or not selected([document], self._selector):
                if self._shown.pop(name, None) is not None:
                    say(self._farewell(name))
                continue
            fingerprint = self._fingerprint(document)
            if self._shown.get(name) != fingerprint:
                self._shown[name] = fingerprint
                say(self._feed.row(document))

    def _is_wanted(self, name: str) -> bool:
        return not self._names or name in self._names

    def _fingerprint(self, document: AnyDocument) -> Any:
        match self._output:
            case ResourceFormat.JSON | ResourceFormat.NAME:
                shown = plain(document)
                shown["status"].pop("lastHeartbeatAt", None)
                return shown
            case ResourceFormat.YAML:
                return declared(document)
            case _:
                return self._feed.table.fingerprint(document)

    def _farewell(self, name: str) -> str:
        match self._output:
            case ResourceFormat.JSON:
                return json_line({"kind": self._kind.value, "name": name, "deleted": True})
            case ResourceFormat.YAML:
                return f"# {self._kind.value}/{name} is deleted\n"
            case ResourceFormat.NAME:
                return f"{self._kind.value}/{name}\n"
            case _:
                titles = self._feed.table.titles
                told_in = titles.index("STATUS") if "STATUS" in titles else 1
                cells = ("deleted" if place == told_in else "-" for place in range(1, len(titles)))
                return self._feed.table.line([name, *cells])
