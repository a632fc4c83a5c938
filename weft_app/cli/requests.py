"""`weft get requests` and `weft get clients`: what a router remembers, beside the registry's resources."""

from collections.abc import Sequence
from pathlib import Path

from weft.client.requests import Requests, connect_requests
from weft.documents.document_base import DocumentPart
from weft.documents.request_documents import ClientDocument, ClientList, RequestDocument, RequestList
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason
from weft_app.cli.columns import age, ago, shortened
from weft_app.cli.options import ResourceFormat
from weft_app.cli.output import Column, TextTable, json_text, say
from weft_app.cli.targets import CLIENT_WORDS, REQUEST_WORDS

MAX_SHOWN = 1_000


def _awaits(request: RequestDocument) -> str:
    if request.queued is not None:
        return request.queued.reason
    return request.loading.stage if request.loading is not None else "-"


def _eta(request: RequestDocument) -> str:
    word = request.queued or request.loading
    return "-" if word is None or word.eta_seconds is None else f"{word.eta_seconds:.0f}s"


def _interval(client: ClientDocument) -> str:
    return "-" if client.usual_interval_seconds is None else f"{client.usual_interval_seconds:.3g}s"


_REQUESTS = (
    Column("REQUEST", lambda request: request.request_id),
    Column("TARGET", lambda request: request.target),
    Column("STATE", lambda request: request.state),
    Column("TENANT", lambda request: request.tenant),
    Column("BAND", lambda request: request.priority),
    Column("POSITION", lambda request: str(request.queued.position) if request.queued else "-"),
    Column("ETA", _eta, ticks=True),
    Column("AGE", lambda request: age(request.arrived_at), ticks=True),
    Column("AWAITS", lambda request: shortened(_awaits(request))),
)
_REQUESTS_WIDE = (
    *_REQUESTS[:-1],
    Column("CLIENT", lambda request: request.client_id or "-"),
    Column("AWAITS", _awaits),
)
_CLIENTS = (
    Column("CLIENT", lambda client: client.client_id),
    Column("PROFILE", lambda client: "yes" if client.has_profile else "no"),
    Column("BAND", lambda client: client.default_priority),
    Column("REQUESTS", lambda client: str(client.request_count)),
    Column("REFUSED", lambda client: str(client.refused_count)),
    Column("RUNNING", lambda client: str(client.running_count)),
    Column("TOKENS", lambda client: str(client.token_count)),
    Column("EVERY", _interval),
    Column("SEEN", lambda client: ago(client.last_seen_at), ticks=True),
    Column("COOLDOWN", lambda client: "yes" if client.cooldown_ends_at else "-"),
)
_CLIENTS_WIDE = (
    *_CLIENTS,
    Column("ROUTE", lambda client: client.route or "-"),
    Column("ASKS FOR", lambda client: ",".join(f"{one.target}={one.request_count}" for one in client.targets) or "-"),
)


def is_about_requests(words: Sequence[str]) -> bool:
    """Whether `weft get` is asked for what a router remembers."""
    return words[0].lower() in REQUEST_WORDS | CLIENT_WORDS


def show(words: Sequence[str], output: ResourceFormat, home: Path) -> None:
    """Print the requests or clients that `words` name; without names, all requests under way or all clients."""
    names = words[1:]
    with connect_requests(home=home) as requests:
        if words[0].lower() in REQUEST_WORDS:
            found: RequestList | ClientList = _requests(requests, names)
        else:
            found = _clients(requests, names)
    say(_rendered(found, output))


def _requests(requests: Requests, names: Sequence[str]) -> RequestList:
    if not names:
        return requests.under_way(MAX_SHOWN)
    items = tuple(requests.get(name) for name in names)
    return RequestList(kind="RequestList", items=items, total=len(items))


def _clients(requests: Requests, names: Sequence[str]) -> ClientList:
    found = requests.clients()
    missing = set(names) - {client.client_id for client in found.items}
    if missing:
        raise WeftError(Reason.NOT_FOUND, f"no client {min(missing)} was seen lately; `weft get clients` lists them")
    items = tuple(client for client in found.items if not names or client.client_id in names)
    return ClientList(kind="ClientList", items=items)


def _rendered(found: RequestList | ClientList, output: ResourceFormat) -> str:
    wide = output is ResourceFormat.WIDE
    match output:
        case ResourceFormat.JSON:
            return json_text(_plain(found))
        case ResourceFormat.YAML:
            raise invalid_field("--output", "must be table, wide, json or name: requests and clients are not declared")
        case ResourceFormat.NAME:
            return "".join(f"{_name(item)}\n" for item in found.items)
        case _ if isinstance(found, RequestList):
            return TextTable(_REQUESTS_WIDE if wide else _REQUESTS).text(found.items) + _more(found)
        case _:
            return TextTable(_CLIENTS_WIDE if wide else _CLIENTS).text(found.items)


def _plain(document: DocumentPart) -> object:
    return document.model_dump(mode="json", by_alias=True, exclude_none=True)


def _name(item: RequestDocument | ClientDocument) -> str:
    return item.request_id if isinstance(item, RequestDocument) else item.client_id


def _more(found: RequestList) -> str:
    left = found.total - len(found.items)
    return f"and {left} more\n" if left > 0 else ""
