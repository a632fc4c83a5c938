"""`weft get requests`."""

from collections.abc import Callable, Sequence
from pathlib import Path

from weft.kernel.errors import invalid_field
from weft_app.cli.follow import RecordChanges, follow
from weft_app.cli.formats import moment_in, text_at
from weft_app.cli.mesh_api import connect
from weft_app.cli.mesh_documents import Document
from weft_app.cli.options import ResourceFormat, note
from weft_app.cli.output import TEXTS, Column, Listing, say

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


_WAITS = "queued.reason|loading.stage"
_ID = (Column("REQUEST", "requestId"), Column("TARGET", "target"))
_WHOSE = (Column("TENANT", "tenant"), Column("PRIORITY", "priority"))
_CLIENT = Column("CLIENT", "clientId")
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
    wide=(*_REQUEST, _CLIENT, Column("WAITS FOR", _WAITS)),
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
    wide=(*_END, _CLIENT, Column("ERROR", "message")),
    name=lambda request: request["requestId"],
)


def show_requests(
    words: Sequence[str], output: ResourceFormat, states: Sequence[str], home: Path, *, watch: bool = False
) -> None:
    """Prints the requests that `words` name; without names, those of the state.

    `watch`: until Ctrl-C, with each that changes.
    """
    names = words[1:]
    if states and (names or len(states) > 1):
        raise invalid_field("--state", "of requests is one, and goes without names")
    if states and states[0] not in STATES:
        raise invalid_field("--state", f"must be one of {', '.join(STATES)}")
    if output is ResourceFormat.YAML:
        raise invalid_field("--output", "must be table, wide, json or name: requests are not declared")
    state = states[0] if states else ""
    listing = _ENDED if state else _REQUESTS

    def read() -> Document:
        return _read(home, names, state)

    if watch:
        _watch(home, output, listing, read, state, is_named=bool(names))
        return
    found = read()
    listing.print(found["items"], output, lambda: found)
    if output not in TEXTS:
        return
    left = found["total"] - len(found["items"])
    if left > 0:
        say(f"and {left} more\n")
    if found["historyMissing"]:
        note("a router's database cannot be read: older requests are missing")
    if unwritten := found.get("unwrittenCount"):
        note(f"{unwritten} ended requests could not be written down, and are not found after a restart")


def _read(home: Path, names: Sequence[str], state: str) -> Document:
    with connect(home) as api:
        if not names:
            return dict(api.get("/v1/requests", limit=MAX_SHOWN, state=state, allTenants=True))
        found = [api.get(f"/v1/requests/{name}", allTenants=True) for name in names]
        return {"kind": "RequestList", "items": found, "total": len(found), "historyMissing": False}


def _watch(
    home: Path,
    output: ResourceFormat,
    listing: Listing,
    read: Callable[[], Document],
    state: str,
    *,
    is_named: bool,
) -> None:
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
