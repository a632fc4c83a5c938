"""`weft get`: tables and documents of resources, requests, clients and tasks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.api.common.v1.error_reason_pb2 import ERROR_REASON_CANCELLED, ERROR_REASON_UNSPECIFIED
from weft.api.router.v1.request_pb2 import RequestRecord
from weft.api.router.v1.request_service_pb2 import ListClientsResponse, ListRequestsResponse
from weft.client.requests import Requests, connect_requests
from weft.client.resources import Registry, connect_registry
from weft.documents.codec import document_of, word_of
from weft.documents.conditions import left_out_words
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import AnyDocument, RunnerDocument, plain
from weft.documents.selectors import Selector, parse_selector
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason
from weft_app.cli.columns import MIXED, NOTHING, RESOURCES, labelled_listing
from weft_app.cli.completion import complete_shown, complete_with_tasks
from weft_app.cli.limit_uses import NO_REGISTRY, KnownUses, limit_uses, with_uses
from weft_app.cli.options import (
    DEFAULT_HOME,
    EXIT_OK,
    HomeOption,
    ResourceFormat,
    ResourceOutputOption,
    WatchOption,
    exit_code,
    naming_fields,
    note,
    reporting,
)
from weft_app.cli.output import TEXTS, Column, Listing, say
from weft_app.cli.record_watch import RecordWatch
from weft_app.cli.request_watch import follow_requests, watch_ended, watch_named, watch_under_way
from weft_app.cli.resource_watch import ResourceWatch
from weft_app.cli.secrets import is_about_secrets, show_secrets
from weft_app.cli.targets import (
    CLIENT_WORDS,
    LEASE_WORDS,
    REQUEST_WORDS,
    ROUTER_WORDS,
    Scope,
    SelectorOption,
    find,
    labelled,
    scope_of,
    selected,
    tenants_named,
    whole_kinds,
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
    Column("ETA", "[{queued.eta:wait}s|{loading.eta:wait}s]", ticks=True),
    Column("AGE", "[{arrive_time:age}]", ticks=True),
    Column("WAITS FOR", "[{queued.reason:short}|{loading.stage:short}]"),
)
_REQUESTS = Listing(
    empty="no request is waiting or running; those that have ended: weft get requests --state ended",
    columns=_REQUEST,
    wide=(*_REQUEST[:-1], Column("CLIENT", "{client_id}"), Column("WAITS FOR", "[{queued.reason}|{loading.stage}]")),
    name=lambda request: request.request_id,
    document=document_of,
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
    Column("ERROR", "[{message:short}]"),
)
_ENDED = Listing(
    empty="no such request has ended in the last hour",
    columns=_END,
    wide=(*_END[:-1], Column("CLIENT", "{client_id}"), Column("ERROR", "[{message}]")),
    name=lambda request: request.request_id,
    document=document_of,
)


def _seconds_of(request: RequestRecord) -> float:
    return (request.end_time.ToNanoseconds() - request.arrive_time.ToNanoseconds()) / 1e9


def _joules(millijoules: int) -> str:
    return f"{millijoules / 1e3:.3g}J"


_CLIENT = (
    Column("CLIENT", "{client_id}"),
    Column("PROFILE", "{has_profile:yes}"),
    Column("PRIORITY", "{default_priority}"),
    Column("REQUESTS", "{request_count}"),
    Column("REFUSED", "{refused_count}"),
    Column("RUNNING", "{running_count}"),
    Column("TOKENS", "{token_count}"),
    Column("INTERVAL", "[{usual_interval:.3g}s]"),
    Column("LAST SEEN", "[{last_seen_time:ago}]", ticks=True),
    Column("COOLDOWN", lambda client: "yes" if client.HasField("cooldown_end_time") else "-"),
)
_CLIENT_WIDE = (
    *_CLIENT,
    Column("ROUTE", "{route}"),
    Column("ASKS FOR", lambda client: ",".join(f"{one.target}={one.request_count}" for one in client.targets) or "-"),
    Column("GPU TIME", "[{device_time:.3g}s of {measured_count}|?]"),
    Column(
        "ENERGY", lambda client: _joules(client.energy_millijoules) if client.HasField("energy_millijoules") else "?"
    ),
)
_CLIENTS = Listing(
    columns=_CLIENT,
    wide=_CLIENT_WIDE,
    name=lambda client: client.client_id,
    document=document_of,
    empty="no client was seen lately: only callers that send the header X-Client-Id are counted",
)


def is_about_requests(words: Sequence[str]) -> bool:
    """Whether the first argument of `weft get` names requests or clients."""
    return words[0].lower() in REQUEST_WORDS | CLIENT_WORDS


def is_about_routers(words: Sequence[str]) -> bool:
    """Whether the first argument of `weft get` names routers."""
    return words[0].partition("/")[0].lower() in ROUTER_WORDS


def is_about_leases(words: Sequence[str]) -> bool:
    """Whether the first argument of `weft get` names leases."""
    return words[0].partition("/")[0].lower() in LEASE_WORDS


def show_requests(
    words: Sequence[str], output: ResourceFormat, states: Sequence[str], home: Path, *, watch: bool = False
) -> None:
    """Prints the requests or clients that `words` name; without names, those of the state, or all clients.

    `watch`: until Ctrl-C, with each that changes.
    """
    names, is_requests = words[1:], words[0].lower() in REQUEST_WORDS
    if states and (names or not is_requests or len(states) > 1):
        raise invalid_field("--state", "of requests is one, and goes without names")
    if output is ResourceFormat.YAML:
        raise invalid_field("--output", "must be table, wide, json or name: requests and clients are not declared")

    def read() -> ListRequestsResponse | ListClientsResponse:
        with connect_requests(home=home) as requests:
            return _requests(requests, names, *states) if is_requests else _clients(requests, names)

    if watch:
        _watch_requests(home, output, lambda: _records(read()), states, is_named=bool(names), is_requests=is_requests)
        return
    found = read()
    if isinstance(found, ListClientsResponse):
        _CLIENTS.print(found.clients, output, lambda: document_of(found))
        return
    (_ENDED if states else _REQUESTS).print(found.requests, output, lambda: document_of(found))
    left = found.total_count - len(found.requests)
    if left > 0 and output in TEXTS:
        say(f"and {left} more\n")
    if found.history_missing and output in TEXTS:
        note("a router's database cannot be read: older requests are missing")
    if found.unwritten_count and output in TEXTS:
        note(f"{found.unwritten_count} ended requests could not be written down, and are not found after a restart")


def _watch_requests(
    home: Path,
    output: ResourceFormat,
    read: Callable[[], Sequence[Any]],
    states: Sequence[str],
    *,
    is_named: bool,
    is_requests: bool,
) -> None:
    if not is_requests:
        RecordWatch(_CLIENTS, output, read).run()
    elif states:
        # Read first: an unknown state is refused there. What ends between the two is in the snapshot of the watch.
        first = read()
        watch_ended(_ENDED, output, first, follow_requests(home, MAX_SHOWN), partial(_has_outcome, states[0]))
    elif is_named:
        watch_named(_REQUESTS, output, read, follow_requests(home))
    else:
        watch_under_way(_REQUESTS, output, follow_requests(home))


def _has_outcome(state: str, request: RequestRecord) -> bool:
    """Whether an ended request is one of a state of `ListRequests`."""
    match state:
        case "completed":
            return request.reason == ERROR_REASON_UNSPECIFIED
        case "cancelled":
            return request.reason == ERROR_REASON_CANCELLED
        case "failed":
            return request.reason not in (ERROR_REASON_UNSPECIFIED, ERROR_REASON_CANCELLED)
        case _:
            return True


def _records(found: ListRequestsResponse | ListClientsResponse) -> Sequence[Any]:
    return found.requests if isinstance(found, ListRequestsResponse) else found.clients


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
        help="models, agents, runners, pools, routes, aliases, profiles, workflows or tenants, and names; or "
        "KIND/NAME...; also task and an id",
        autocompletion=complete_with_tasks,
    ),
]
ShownArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="KIND [NAME...]",
        help="models, agents, runners, pools, routes, aliases, profiles, workflows, tenants or all, and names; or "
        "KIND/NAME..., or NAME; requests, clients, tasks, secrets, leases, routers",
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
        others = (is_about_tasks, is_about_secrets, is_about_requests, is_about_leases, is_about_routers)
        if selector and any(is_about(resources) for is_about in others):
            raise invalid_field("--selector", "goes with models and agents")
        if caller and not is_about_tasks(resources):
            raise invalid_field("--caller", "goes with tasks")
        if is_about_tasks(resources):
            show_tasks(resources, output, states or (), home, caller=caller, watch=watch)
            return
        if is_about_secrets(resources):
            show_secrets(resources, output, home, watch=watch)
            return
        if is_about_requests(resources):
            show_requests(resources, output, states or (), home, watch=watch)
            return
        if states:
            raise invalid_field("--state", "goes with tasks and requests")
        if is_about_leases(resources):
            from weft_app.cli.lease_table import show_leases  # noqa: PLC0415 - the other kinds start without it

            show_leases(resources, output, home, watch=watch)
            return
        if is_about_routers(resources):
            from weft_app.cli.router_table import show_routers  # noqa: PLC0415 - the other kinds start without it

            show_routers(resources, output, home, watch=watch)
            return
        _show_resources(resources, selector, output, home, watch=watch)


def _show_resources(words: list[str], selector: str, output: ResourceFormat, home: Path, *, watch: bool) -> None:
    """Prints the resources that `words` name, or those of their kinds that the selector selects."""
    wanted = parse_selector(selector, "--selector")
    try:
        if watch:
            with connect_registry(home=home) as registry:
                scope = labelled(scope_of(registry, words), selector)
            ResourceWatch(scope, output, wanted).run(home)
            return
        with connect_registry(home=home) as registry:
            scope = labelled(scope_of(registry, words), selector)
            found = _found(registry, scope, wanted, output)
    except WeftError as error:
        if error.reason not in NO_REGISTRY or output not in TEXTS or selector:
            raise
        _show_what_a_router_knows(words, output, home, error, watch=watch)
        return
    if tenants := found.documents.get(ResourceKind.TENANT):
        found.documents[ResourceKind.TENANT] = with_uses(tenants, limit_uses(home))
    if len(scope.kinds) > 1:
        if any(found.documents.values()) or not found.failures:
            _print_kinds(found.documents, output, is_selected=bool(wanted))
        _end_with(found.failures)
        return
    ((kind, documents),) = found.documents.items()
    listing = (
        replace(RESOURCES[kind], empty=f"no {kind.plural} have the labels {selector}") if wanted else RESOURCES[kind]
    )
    # One that was named is printed without a list around it.
    listing.print(documents, output, (lambda: plain(documents[0])) if len(scope.targets) == 1 else None)
    for line in found.left_out:
        note(line)


@dataclass(frozen=True, slots=True)
class _Found:
    """The resources of several kinds, as far as the registry answers."""

    documents: dict[ResourceKind, list[AnyDocument]]
    failures: dict[ResourceKind, WeftError]
    """Why there is nothing of a kind."""
    left_out: list[str] = field(default_factory=list)
    """What is served of servers whose models are not all served, in words."""


def _found(registry: Registry, scope: Scope, wanted: Selector, output: ResourceFormat) -> _Found:
    """Returns the resources of a scope; of several whole kinds those that can be had, where people read them.

    Raises the first error where nothing can be had.
    """
    found = _Found({}, {})
    is_partial = len(scope.kinds) > 1 and not scope.targets and output in TEXTS
    for place, kind in enumerate(scope.kinds):
        try:
            found.documents[kind] = selected(_documents(registry, scope, kind), wanted)
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
        found.left_out.extend(_left_out(registry))
    return found


def _left_out(registry: Registry) -> list[str]:
    """Returns what runners serve of servers whose models are not all served, in words."""
    runners = registry.documents(ResourceKind.RUNNER)
    states = [each.observed for each in runners if isinstance(each, RunnerDocument) and each.observed is not None]
    return [words for state in states if (words := left_out_words(state))]


def _show_what_a_router_knows(
    words: list[str], output: ResourceFormat, home: Path, error: WeftError, *, watch: bool
) -> None:
    """Prints what there is of `words` where no registry answers: limits of tenants. Raises `error` for all else."""
    kinds, tenants = whole_kinds(words), tenants_named(words)
    if tenants is None and (watch or ResourceKind.TENANT not in kinds):
        raise error
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


def _documents(registry: Registry, scope: Scope, kind: ResourceKind) -> list[AnyDocument]:
    if not scope.targets:
        return registry.documents(kind)
    return [find(registry, target) for target in scope.targets if target.kind is kind]


def _print_kinds(
    found: Mapping[ResourceKind, Sequence[AnyDocument]], output: ResourceFormat, *, is_selected: bool
) -> None:
    """Prints a table for each kind of which there are resources, with KIND/NAME in it; else one list of all."""
    everything = [document for documents in found.values() for document in documents]
    if output not in TEXTS:
        MIXED.print(everything, output)
    elif not everything:
        note("nothing has such labels" if is_selected else NOTHING)
    else:
        tables = (labelled_listing(kind).text(documents, output) for kind, documents in found.items() if documents)
        say("\n".join(tables))
