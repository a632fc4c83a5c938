"""Records that are listed by reading them: leases of accelerator memory, routers, secrets and clients, as data."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.names import MAX_NAME_CHARS
from weft.kernel.reasons import Reason
from weft.kernel.units import size_words
from weft.kernel.unknown_names import SECRET, unknown_name
from weft_app.cli.follow import poll_records
from weft_app.cli.mesh_api import connect
from weft_app.cli.mesh_documents import Document
from weft_app.cli.options import ResourceFormat
from weft_app.cli.output import Column, Listing, print_table, say
from weft_app.cli.targets import CLIENT_WORDS, LEASE_WORDS, ROUTER_WORDS, SECRET_WORDS

SECRETS = "/v1/admin/secrets"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordKind:
    """Where records of one kind are read, and how they are shown."""

    listing: Listing
    path: str
    key: str = "name"
    """Where a record has its name."""
    rows: Callable[[Document], list[Document]] = lambda found: list(found["items"])
    """Returns the records in what the path answers."""
    unknown: Callable[[str, Iterable[str]], WeftError]
    """Returns the error for a name that none of the others, given as well, is."""

    def read(self, home: Path) -> list[Document]:
        """Returns the records of the mesh. Raises SERVICE_UNAVAILABLE."""
        with connect(home) as api:
            return self.rows(api.get(self.path))

    def show(self, words: Sequence[str], output: ResourceFormat, home: Path, *, watch: bool = False) -> None:
        """Prints the records that `words` name, all without names; `watch`: until Ctrl-C, with each that changes."""
        if output == "yaml":
            raise invalid_field(
                "--output", f"must be table, wide, json or name: {self.listing.plural} are not declared"
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
    """Returns the leases of all hosts, each with the name of its host."""
    return [{"kind": "lease", "host": host["host"], **lease} for host in hosts for lease in host["leases"]]


def leased_bytes(lease: Document) -> int:
    """Returns the memory of a lease, on all devices."""
    return sum(lease["bytesByDevice"].values())


def _end_words(lease: Document) -> str:
    """Returns when a lease ends; no lease has a time at which it does."""
    if lease["state"] != "held":
        return "when its processes have ended"
    return "with its program" if lease["holderKind"] == "program" else "when the model is unloaded"


def _known(key: str, text: Callable[[Any], str]) -> Callable[[Document], str]:
    """Returns the text of a value; "?": it is not known."""
    return lambda record: text(record[key]) if key in record else "?"


def _gpu_time(client: Document) -> str:
    return f"{client['deviceSeconds']:.3g}s of {client['measuredCount']}" if "deviceSeconds" in client else "?"


_LEASE = (
    Column("LEASE", "leaseId"),
    Column("HOST", "host"),
    Column("HOLDER", "holder"),
    Column("PURPOSE", "purpose"),
    Column("STATE", lambda lease: lease["state"] + (", unowned" if lease.get("unowned") else "")),
    Column("MEMORY", lambda lease: size_words(leased_bytes(lease))),
    Column("DEVICES", lambda lease: ",".join(lease["bytesByDevice"])),
    Column("AGE", "createdAt", "age", ticks=True),
    Column("ENDS", _end_words),
)
_DEVICE = (
    Column("HOST", "host"),
    Column("DEVICE", lambda device: f"{device['index']} {device['name']}"),
    Column("TOTAL", "totalBytes", "size"),
    Column("BOOKED", "bookedBytes", "size"),
    Column("FOREIGN", _known("foreignBytes", size_words)),
    Column("FREE", "freeBytes", "size"),
    Column("USE", _known("utilization", "{:.0%}".format)),
    Column("POWER", _known("powerMilliwatts", lambda milliwatts: f"{milliwatts / 1e3:.0f}W")),
)
_ROUTER = (
    Column("ROUTER", "name"),
    Column("STATE", lambda router: "leader" if router["leading"] else "standby"),
    Column("ADDRESS", "address"),
    Column("AGE", "registeredAt", "age", ticks=True),
)
_SECRET = (
    Column("SECRET", "name"),
    Column("VERSION", "version"),
    Column("AGE", "updateTime", "age", ticks=True),
    Column("USED BY", "usedBy", "commas"),
)
_CLIENT = (
    Column("CLIENT", "clientId"),
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
    Column(
        "ASKS FOR",
        lambda client: ",".join(f"{one['target']}={one['requestCount']}" for one in client.get("targets", ())),
    ),
    Column("GPU TIME", _gpu_time),
    Column("ENERGY", _known("energyMillijoules", lambda millijoules: f"{millijoules / 1e3:.3g}J")),
)

LEASES = RecordKind(
    path="/v1/admin/gpu-memory",
    key="leaseId",
    rows=lambda found: lease_rows(found["hosts"]),
    unknown=_missing("there is no lease {name}: it has ended, or never was"),
    listing=Listing(
        columns=_LEASE,
        wide=(
            *_LEASE,
            Column("USED", _known("seenBytes", size_words)),
            Column("PRIORITY", "priority"),
            Column("REQUESTS", "activeRequests"),
        ),
        name=lambda lease: f"lease/{lease['leaseId']}",
        kind="LeaseList",
        plural="leases",
        empty="no accelerator memory is leased; weft lease acquire leases some, and so does each model that is loaded",
    ),
)
ROUTERS = RecordKind(
    path="/api/v1/routers",
    unknown=_missing("there is no router {name}; `weft get routers` lists them"),
    listing=Listing(
        columns=_ROUTER,
        wide=(*_ROUTER, Column("VERSION", "version")),
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
        wide=(*_SECRET, Column("CREATED", "createTime", "age", ticks=True)),
        name=lambda secret: f"secret/{secret['name']}",
        kind="SecretList",
        plural="secrets",
        empty="there are no secrets; weft create secret NAME keeps one",
    ),
)
CLIENTS = RecordKind(
    path="/v1/clients",
    key="clientId",
    unknown=_missing("no client {name} was seen lately; `weft get clients` lists them"),
    listing=Listing(
        columns=_CLIENT,
        wide=_CLIENT_WIDE,
        name=lambda client: str(client["clientId"]),
        kind="ClientList",
        plural="clients",
        empty="no client was seen lately: only callers that send the header X-Client-Id are counted",
    ),
)
RECORDS: Mapping[str, RecordKind] = {
    **dict.fromkeys(LEASE_WORDS, LEASES),
    **dict.fromkeys(ROUTER_WORDS, ROUTERS),
    **dict.fromkeys(SECRET_WORDS, SECRET_RECORDS),
    **dict.fromkeys(CLIENT_WORDS, CLIENTS),
}
"""The kinds of records by the words that name them."""


def hosts_of(home: Path) -> list[Document]:
    """Returns the hosts with accelerators and the leases on them."""
    with connect(home) as api:
        return list(api.get(LEASES.path)["hosts"])


def print_hosts(hosts: Sequence[Document]) -> None:
    """Prints a table of the devices, and one of the leases where there are any."""
    print_table([{**device, "host": host["host"]} for host in hosts for device in host["devices"]], _DEVICE)
    if leases := lease_rows(hosts):
        say("\n")
        print_table(leases, _LEASE)
