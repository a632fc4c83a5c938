"""`weft get requests` and `weft get clients`."""

from collections.abc import Callable, Sequence
from pathlib import Path

from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason
from weft_app.cli.follow import RecordChanges, follow, poll_records
from weft_app.cli.formats import moment_in, text_at
from weft_app.cli.mesh_api import connect
from weft_app.cli.mesh_documents import Document
from weft_app.cli.options import ResourceFormat, note
from weft_app.cli.output import TEXTS, Column, Listing, say
from weft_app.cli.targets import REQUEST_WORDS

MAX_SHOWN = 1_000
STATES = ("ended", "completed", "failed", "cancelled")


def _eta(request: Document) -> str | None:
    eta = text_at(request, "queued.etaSeconds|loading.etaSeconds", "wait")
    return None if eta is None else f"{eta}s"


def _tokens(request: Document) -> str | None:
    receipt = request.get("receipt", {})
    counts = [receipt.get(name, 0) for name in ("promptTokens", "completionTokens")]
    return "+".join(map(str, counts)) if all(counts) else None


def _seconds_of(request: Document) -> float:
    return (moment_in(request["endedAt"]) - moment_in(request["arrivedAt"])).total_seconds()


def _targets(client: Document) -> str:
    return ",".join(f"{one['target']}={one['requestCount']}" for one in client.get("targets", ()))


def _gpu_time(client: Document) -> str:
    return f"{client['deviceSeconds']:.3g}s of {client['measuredCount']}" if "deviceSeconds" in client else "?"


def _energy(client: Document) -> str:
    return f"{client['energyMillijoules'] / 1e3:.3g}J" if "energyMillijoules" in client else "?"


_WAITS = "queued.reason|loading.stage"
_ID = (Column("REQUEST", "requestId"), Column("TARGET", "target"))
_WHOSE = (Column("TENANT", "tenant"), Column("PRIORITY", "priority"))
_CLIENT_ID = Column("CLIENT", "clientId")
_REQUEST = (
    *_ID,
    Column("STATE", "state"),
    *_WHOSE,
    Column("POSITION", "queued.position"),
    Column("ETA", _eta, ticks=True),
    Column("AGE", "arrivedAt", "age", ticks=True),
)
_REQUESTS = Listing(
    empty="no request is waiting or running; those that have ended: weft get requests --state ended",
    columns=(*_REQUEST, Column("WAITS FOR", _WAITS, "short")),
    wide=(*_REQUEST, _CLIENT_ID, Column("WAITS FOR", _WAITS)),
    name=lambda request: request["requestId"],
)
_END = (
    *_ID,
    Column("OUTCOME", lambda request: request.get("reason", "completed")),
    *_WHOSE,
    Column("TOKENS", _tokens),
    Column("TOOK", lambda request: f"{_seconds_of(request):.3g}s"),
    Column("ENDED", "endedAt", "ago", ticks=True),
)
_ENDED = Listing(
    empty="no such request has ended in the last hour",
    columns=(*_END, Column("ERROR", "message", "short")),
    wide=(*_END, _CLIENT_ID, Column("ERROR", "message")),
    name=lambda request: request["requestId"],
)
_CLIENT = (
    _CLIENT_ID,
    Column("PROFILE", "hasProfile"),
    Column("PRIORITY", "defaultPriority"),
    Column("REQUESTS", "requestCount"),
    Column("REFUSED", "refusedCount"),
    Column("RUNNING", "runningCount"),
    Column("TOKENS", "tokenCount"),
    Column("INTERVAL", "usualIntervalSeconds", "{:.3g}s"),
    Column("LAST SEEN", "lastSeenAt", "ago", ticks=True),
    Column("COOLDOWN", lambda client: "yes" if "cooldownEndsAt" in client else None),
)
_CLIENT_WIDE = (
    *_CLIENT,
    Column("ROUTE", "route"),
    Column("ASKS FOR", _targets),
    Column("GPU TIME", _gpu_time),
    Column("ENERGY", _energy),
)
_CLIENTS = Listing(
    columns=_CLIENT,
    wide=_CLIENT_WIDE,
    name=lambda client: client["clientId"],
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
    if states and states[0] not in STATES:
        raise invalid_field("--state", f"must be one of {', '.join(STATES)}")
    if output is ResourceFormat.YAML:
        raise invalid_field("--output", "must be table, wide, json or name: requests and clients are not declared")
    state = states[0] if states else ""
    listing = (_ENDED if state else _REQUESTS) if is_requests else _CLIENTS

    def read() -> Document:
        return _read(home, names, state, is_requests=is_requests)

    if watch:
        _watch(home, output, listing, read, state, is_named=bool(names))
        return
    found = read()
    listing.print(found["items"], output, lambda: found)
    if output not in TEXTS or not is_requests:
        return
    left = found["total"] - len(found["items"])
    if left > 0:
        say(f"and {left} more\n")
    if found["historyMissing"]:
        note("a router's database cannot be read: older requests are missing")
    if unwritten := found.get("unwrittenCount"):
        note(f"{unwritten} ended requests could not be written down, and are not found after a restart")


def _read(home: Path, names: Sequence[str], state: str, *, is_requests: bool) -> Document:
    with connect(home) as api:
        if not is_requests:
            return _named_clients(api.get("/v1/clients"), names)
        if not names:
            return dict(api.get("/v1/requests", limit=MAX_SHOWN, state=state, allTenants=True))
        found = [api.get(f"/v1/requests/{name}", allTenants=True) for name in names]
        return {"kind": "RequestList", "items": found, "total": len(found), "historyMissing": False}


def _named_clients(found: Document, names: Sequence[str]) -> Document:
    missing = set(names) - {client["clientId"] for client in found["items"]}
    if missing:
        raise WeftError(Reason.NOT_FOUND, f"no client {min(missing)} was seen lately; `weft get clients` lists them")
    return found | {"items": [client for client in found["items"] if not names or client["clientId"] in names]}


def _watch(
    home: Path,
    output: ResourceFormat,
    listing: Listing,
    read: Callable[[], Document],
    state: str,
    *,
    is_named: bool,
) -> None:
    if listing is _CLIENTS:
        poll_records(listing, output, lambda: read()["items"])
    changes, is_first = RecordChanges(listing, output), True
    first = read()["items"] if state or is_named else []
    named = {record["requestId"] for record in first} if is_named else set()
    for watched, changed in follow(home, ("request",), allTenants=True):
        records = [watched["request"][name] for _, name in changed if name in watched["request"]]
        if is_first:
            # What ends between the reading and the snapshot of the watch is in the snapshot.
            changes.all(first or [record for record in records if record["state"] != "ended" and not state])
            is_first = False
        if not is_named:
            _print_news(changes, records, state)
        elif not named.isdisjoint(record["requestId"] for record in records):
            changes.all(read()["items"])


def _print_news(changes: RecordChanges, records: list[Document], state: str) -> None:
    """Prints requests under way that changed, once more when they end; with a state those that ended so."""
    for record in sorted(records, key=lambda record: str(record.get("endedAt", ""))):
        has_ended = record["state"] == "ended"
        if has_ended and not state:
            changes.last(record)
        elif has_ended is bool(state) and (not state or _has_outcome(state, record)):
            changes.one(record)


def _has_outcome(state: str, request: Document) -> bool:
    """Whether an ended request is one of a state of `weft get requests --state`."""
    reason = request.get("reason", "completed")
    return state in ("ended", reason if reason in ("completed", "cancelled") else "failed")
