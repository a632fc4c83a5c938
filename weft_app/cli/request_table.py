"""`weft get requests` and `weft get clients`."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from weft.api.common.v1.error_reason_pb2 import ERROR_REASON_CANCELLED, ERROR_REASON_UNSPECIFIED
from weft.api.router.v1.request_pb2 import RequestRecord
from weft.api.router.v1.request_service_pb2 import ListClientsResponse, ListRequestsResponse
from weft.client.requests import Requests, connect_requests
from weft.documents.codec import document_of, word_of
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason
from weft_app.cli.options import ResourceFormat, naming_fields, note
from weft_app.cli.output import TEXTS, Column, Listing, say
from weft_app.cli.record_watch import RecordWatch
from weft_app.cli.request_watch import follow_requests, watch_ended, watch_named, watch_under_way
from weft_app.cli.targets import REQUEST_WORDS

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
