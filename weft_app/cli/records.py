"""Records other than resources: leases, routers, secrets, clients, requests, and usage of limits."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.names import MAX_NAME_CHARS
from weft.kernel.values.units import Rate, RateUnit, size_words, time_words, wait_words
from weft.kernel.values.unknown_names import SECRET, unknown_name
from weft_app.cli.completion import SECRETS
from weft_app.cli.explain import agent_words, retry_words, tries_words
from weft_app.cli.follow import RecordChanges, follow, poll_records
from weft_app.cli.mesh_api import Document, connect
from weft_app.cli.options import ResourceFormat
from weft_app.cli.output import FORMATS, TEXTS, Listing, custom_columns, moment_in, print_table, shortened
from weft_app.cli.short_ids import REQUESTS, full_id
from weft_app.cli.terminal import note, say


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordKind:
    """The API path and the output of records of one kind."""

    listing: Listing
    path: str
    key: str = "name"
    """Key of the name in a record."""
    rows: Callable[[Document], list[Document]] = lambda found: list(found["items"])
    """Returns the records in the response."""
    unknown: Callable[[str, Iterable[str]], WeftError]
    """Returns the error for an unknown name, given the known ones."""

    def read(self, home: Path) -> list[Document]:
        """Returns the records of the mesh. Raises SERVICE_UNAVAILABLE."""
        with connect(home) as api:
            return self.rows(api.get(self.path))

    def show(self, words: Sequence[str], output: ResourceFormat, home: Path, *, watch: bool = False) -> None:
        """Prints the records named in `words`, by default all; `watch`: until Ctrl-C, with each that changes."""
        if output == "yaml":
            raise invalid_field(
                "--output", f"must be table, wide, json or name: {self.listing.plural} cannot be declared"
            )
        names = {word.partition("/")[2] for word in words} if "/" in words[0] else set(words[1:])
        everything: list[Document] = []

        def picked() -> list[Document]:
            everything[:] = self.read(home)
            return [record for record in everything if not names or record[self.key] in names]

        found = picked()
        if missing := names - {record[self.key] for record in found}:
            raise self.unknown(min(missing), (str(record[self.key]) for record in everything))
        if watch:
            poll_records(self.listing, output, picked)
        else:
            self.listing.print(found, output)


def _missing(text: str) -> Callable[[str, Iterable[str]], WeftError]:
    return lambda name, _: WeftError(Reason.NOT_FOUND, text.format(name=name[:MAX_NAME_CHARS]))


def lease_rows(hosts: Sequence[Document]) -> list[Document]:
    """Returns the leases of all hosts with the host's name."""
    return [{"kind": "lease", "host": host["host"], **lease} for host in hosts for lease in host["leases"]]


def leased_bytes(lease: Document) -> int:
    """Returns the memory of a lease over all devices."""
    return sum(lease["bytesByDevice"].values())


def _end_words(lease: Document) -> str:
    """Returns when a lease ends. Leases have no end time."""
    if lease["state"] != "held":
        return "when its processes have ended"
    return "with its program" if lease["holderKind"] == "program" else "when the model is unloaded"


def _known(key: str, text: Callable[[Any], str]) -> Callable[[Document], str]:
    """Formats a value; "?" if it is unknown."""
    return lambda record: text(record[key]) if key in record else "?"


_LEASE = custom_columns(
    "LEASE:leaseId HOST:host HOLDER:holder? PURPOSE:purpose STATE MEMORY DEVICES AGE:createdAt:age~ ENDS",
    STATE=lambda lease: lease["state"] + (", unowned" if lease.get("unowned") else ""),
    MEMORY=lambda lease: size_words(leased_bytes(lease)),
    DEVICES=lambda lease: ",".join(lease["bytesByDevice"]),
    ENDS=_end_words,
)
_LEASE_WIDE = _LEASE + custom_columns(
    "USED PRIORITY:priority REQUESTS:activeRequests", USED=_known("seenBytes", size_words)
)
_DEVICE = custom_columns(
    "HOST:host DEVICE TOTAL:totalBytes:size BOOKED:bookedBytes:size FOREIGN FREE:freeBytes:size USE POWER",
    DEVICE=lambda device: f"{device['index']} {device['name']}",
    FOREIGN=_known("foreignBytes", size_words),
    USE=_known("utilization", "{:.0%}".format),
    POWER=_known("powerMilliwatts", lambda milliwatts: f"{milliwatts / 1e3:.0f}W"),
)
_ROUTER = custom_columns(
    "ROUTER:name STATE ADDRESS:address AGE:registeredAt:age~",
    STATE=lambda router: "leader" if router["leading"] else "standby",
)
_SECRET = custom_columns("SECRET:name VERSION:version AGE:updateTime:age~ USED_BY:usedBy:commas")
_CLIENT = custom_columns(
    "CLIENT:clientId PROFILE:hasProfile? PRIORITY:defaultPriority? REQUESTS:requestCount REFUSED:refusedCount "
    "RUNNING:runningCount TOKENS:tokenCount INTERVAL:usualIntervalSeconds:time LAST_SEEN:lastSeenAt:ago~ COOLDOWN",
    COOLDOWN=lambda client: "yes" if "cooldownEndsAt" in client else None,
)
_CLIENT_WIDE = _CLIENT + custom_columns(
    "ROUTE:route ASKS_FOR GPU_TIME ENERGY",
    ASKS_FOR=lambda client: ",".join(f"{one['target']}={one['requestCount']}" for one in client.get("targets", ())),
    GPU_TIME=lambda client: (
        f"{time_words(client['deviceSeconds'])} of {client['measuredCount']}" if "deviceSeconds" in client else "?"
    ),
    ENERGY=_known("energyMillijoules", lambda millijoules: f"{millijoules / 1e3:.3g}J"),
)

LEASES = RecordKind(
    path="/v1/admin/gpu-memory",
    key="leaseId",
    rows=lambda found: lease_rows(found["hosts"]),
    unknown=_missing("there is no lease {name}: it has ended or never existed"),
    listing=Listing(
        columns=_LEASE,
        wide=_LEASE_WIDE,
        name=lambda lease: f"lease/{lease['leaseId']}",
        kind="LeaseList",
        plural="leases",
        empty="no accelerator memory is leased; loaded models and weft mesh lease acquire lease memory",
    ),
)
ROUTERS = RecordKind(
    path="/api/v1/routers",
    unknown=_missing("there is no router {name}; `weft get routers` lists them"),
    listing=Listing(
        columns=_ROUTER,
        wide=_ROUTER + custom_columns("VERSION:version"),
        name=lambda router: f"router/{router['name']}",
        kind="RouterList",
        plural="routers",
        empty="no router has registered with this mesh's registry",
    ),
)
SECRET_RECORDS = RecordKind(
    path=SECRETS,
    unknown=lambda name, others: unknown_name(SECRET, name, others),
    listing=Listing(
        columns=_SECRET,
        wide=_SECRET + custom_columns("CREATED:createTime:age~"),
        name=lambda secret: f"secret/{secret['name']}",
        kind="SecretList",
        plural="secrets",
        empty="there are no secrets; weft keys secret create NAME creates one",
    ),
)
CLIENTS = RecordKind(
    path="/v1/clients",
    key="clientId",
    unknown=_missing("no recent client {name}; `weft get clients` lists them"),
    listing=Listing(
        columns=_CLIENT,
        wide=_CLIENT_WIDE,
        name=lambda client: str(client["clientId"]),
        kind="ClientList",
        plural="clients",
        empty="no recent clients: only callers that send the header X-Client-Id are counted",
    ),
)
RECORDS: Mapping[str, RecordKind] = {"lease": LEASES, "router": ROUTERS, "secret": SECRET_RECORDS, "client": CLIENTS}


def hosts_of(home: Path) -> list[Document]:
    """Returns the hosts with accelerators, and their leases."""
    with connect(home) as api:
        return list(api.get(LEASES.path)["hosts"])


def print_hosts(hosts: Sequence[Document]) -> None:
    """Prints a table of the devices, and one of the leases, if any."""
    print_table([{**device, "host": host["host"]} for host in hosts for device in host["devices"]], _DEVICE)
    if leases := lease_rows(hosts):
        say("\n")
        print_table(leases, _LEASE)


MAX_SHOWN_USES = 3
"""Maximum number of a tenant's windows in a table; `weft describe` has all of them."""


def limit_uses(home: Path, tenants: Collection[str] = ()) -> list[Document]:
    """Returns the usage of tenants' limits (empty: of all); empty, with a note, if no router answers."""
    try:
        return read_uses(home, tenants)
    except WeftError as error:
        note(f"no router answers: the use of limits is unknown ({error.message})")
        return []


def read_uses(home: Path, tenants: Collection[str] = ()) -> list[Document]:
    """Returns the usage of tenants' limits (empty: of all)."""
    only = next(iter(tenants)) if len(tenants) == 1 else ""
    with connect(home) as api:
        found = api.get("/v1/admin/limit-uses", tenant=only)["items"]
    return [use for use in found if not tenants or use["tenant"] in tenants]


def known_uses(home: Path, error: WeftError, tenants: Collection[str]) -> list[Document]:
    """Returns a router's usage of tenants' limits. Raises `error`, the registry's, if no router answers either."""
    try:
        return read_uses(home, tenants)
    except WeftError:
        raise error from None


def note_missing_declarations(error: WeftError, more: str = "") -> None:
    """Prints what is missing from `known_uses`; `error` is the registry's."""
    note(
        "no registry answers: tenant declarations (weight, source, tenants without a limit) are unknown; these are "
        f"the limits that a router counts{more} ({error.message})"
    )


def used_text(uses: Sequence[Document]) -> str:
    """Returns a tenant's fullest windows as text such as "12 of 100 req/min", without unused ones."""
    found = sorted((use for use in uses if use["used"]), key=lambda use: use["used"] / use["limit"], reverse=True)
    shown = [f"{use['used']} of {rate_of(use)}{_subject(use)}" for use in found[:MAX_SHOWN_USES]]
    return ", ".join(shown) + (f" and {len(found) - MAX_SHOWN_USES} more" if len(found) > MAX_SHOWN_USES else "")


def rate_of(use: Document) -> Rate:
    """Returns the rate of a window."""
    unit = RateUnit.TOKENS if use["unit"] == "tokens" else RateUnit.REQUESTS
    return Rate(use["limit"], int(use["windowSeconds"]), unit)


def _subject(use: Document) -> str:
    parts = [
        f" by {FORMATS['actor'](use['key'])}" if "key" in use else "",
        f" for {use['model']}" if "model" in use else "",
    ]
    return "".join([*parts, f" of client {use['client']}" if "client" in use else ""])


LIMIT_USES = custom_columns(
    "LIMIT OF USED:used LEFT EMPTY_IN~",
    LIMIT=lambda use: str(rate_of(use)),
    OF=lambda use: _subject(use).strip() or "the tenant",
    LEFT=lambda use: str(max(0, use["limit"] - use["used"])),
    EMPTY_IN=lambda use: f"{wait_words(use['resetSeconds'])} s" if use["used"] else "-",
)
_COLUMNS = custom_columns("TENANT:tenant") + LIMIT_USES
LIMIT_WINDOWS = Listing(
    columns=_COLUMNS,
    wide=_COLUMNS,
    name=lambda use: f"{use['tenant']} {rate_of(use)}{_subject(use)}",
    empty="the router has no limits of this tenant",
)


MAX_SHOWN = 1_000
STATES = ("ended", "completed", "failed", "cancelled")


def _token_counts(request: Document) -> str | None:
    receipt = request.get("receipt", {})
    counts = [receipt.get(name, 0) for name in ("promptTokens", "completionTokens")]
    about = "~" if receipt.get("promptEstimated") else ""
    return about + "+".join(map(str, counts)) if all(counts) else None


def _seconds_of(request: Document) -> float:
    return (moment_in(request["endedAt"]) - moment_in(request["arrivedAt"])).total_seconds()


def _waits_for(request: Document) -> str:
    waits = request.get("queued", {}).get("reason") or request.get("loading", {}).get("stage", "")
    return retry_words(request) or waits


_REQUEST = custom_columns(
    "REQUEST:requestId TARGET:target STATE TENANT:tenant? PRIORITY:priority? POSITION "
    "ETA:queued.etaSeconds|loading.etaSeconds:eta~ AGE:arrivedAt:age~",
    STATE=lambda request: request["state"] + tries_words(request),
    POSITION=lambda request: str(request.get("queued", {}).get("position") or "-"),
)
_AGENT = custom_columns("CLIENT:clientId AGENT", AGENT=agent_words)
_REQUESTS = Listing(
    empty="no requests are waiting or running; list ended ones with weft get requests --state ended",
    columns=_REQUEST + custom_columns("WAITS_FOR", WAITS_FOR=lambda request: shortened(_waits_for(request))),
    wide=_REQUEST + _AGENT + custom_columns("WAITS_FOR", WAITS_FOR=_waits_for),
    name=lambda request: request["requestId"],
)
_END = custom_columns(
    "REQUEST:requestId TARGET:target OUTCOME TENANT:tenant? PRIORITY:priority? TOKENS TOOK ENDED:endedAt:ago~",
    OUTCOME=lambda request: request.get("reason", "completed") + tries_words(request),
    TOKENS=_token_counts,
    TOOK=lambda request: time_words(_seconds_of(request)),
)
_ENDED = Listing(
    empty="no such request has ended in the last hour",
    columns=_END + custom_columns("ERROR:message:short"),
    wide=_END + _AGENT + custom_columns("ERROR:message"),
    name=lambda request: request["requestId"],
)


def show_requests(
    words: Sequence[str], output: ResourceFormat, states: Sequence[str], home: Path, *, watch: bool = False
) -> None:
    """Prints the requests named in `words`, by default those in the given states.

    `watch`: until Ctrl-C, with each that changes.
    """
    names = words[1:]
    if states and (names or len(states) > 1):
        raise invalid_field("--state", "for requests must be one state, without names")
    if states and states[0] not in STATES:
        raise invalid_field("--state", f"must be one of {', '.join(STATES)}")
    if output is ResourceFormat.YAML:
        raise invalid_field("--output", "must be table, wide, json or name: requests cannot be declared")
    state = states[0] if states else ""
    listing = _ENDED if state else _REQUESTS

    def read() -> Document:
        return _read_requests(home, names, state)

    if watch:
        _watch_requests(home, output, listing, read, state, is_named=bool(names))
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
        note(f"{unwritten} ended requests could not be stored, and will be missing after a restart")


def _read_requests(home: Path, names: Sequence[str], state: str) -> Document:
    with connect(home) as api:
        if not names:
            return dict(api.get("/v1/requests", limit=MAX_SHOWN, state=state, allTenants=True))
        found = [api.get(f"/v1/requests/{full_id(api, REQUESTS, name)}", allTenants=True) for name in names]
        return {"kind": "RequestList", "items": found, "total": len(found), "historyMissing": False}


def _watch_requests(
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
            # Requests that end between the reading and the watch's snapshot are in the snapshot.
            changes.all(first or [record for record in records if record["state"] != "ended" and not state])
            is_first = False
        if not is_named:
            _print_news(changes, records, state)
        elif not named.isdisjoint(record["requestId"] for record in records):
            changes.all(read()["items"])


def _print_news(changes: RecordChanges, records: list[Document], state: str) -> None:
    """Prints changed running requests, and each once more when it ends; with a state only those that ended so."""
    for record in sorted(records, key=lambda record: str(record.get("endedAt", ""))):
        has_ended = record["state"] == "ended"
        if has_ended and not state:
            changes.last(record)
        elif has_ended is bool(state) and (not state or _has_outcome(state, record)):
            changes.one(record)


def _has_outcome(state: str, request: Document) -> bool:
    """Whether an ended request has a state of `weft get requests --state`."""
    reason = request.get("reason", "completed")
    return state in ("ended", reason if reason in ("completed", "cancelled") else "failed")
