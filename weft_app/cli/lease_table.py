"""Leases of accelerator memory as tables and documents: `weft lease list` and `weft get leases`."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.units import size_words
from weft_app.cli.follow import show_records
from weft_app.cli.formats import moment_in
from weft_app.cli.mesh_api import connect
from weft_app.cli.mesh_documents import Document
from weft_app.cli.options import ResourceFormat
from weft_app.cli.output import Column, Listing, print_table, say

MAX_LEASE_ID_CHARS = 128


def hosts_of(home: Path) -> list[Document]:
    """Returns the hosts with accelerators and the leases on them."""
    with connect(home) as api:
        return list(api.get("/v1/admin/gpu-memory")["hosts"])


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


_DEVICE_COLUMNS = (
    Column("HOST", "host"),
    Column("DEVICE", lambda device: f"{device['index']} {device['name']}"),
    Column("TOTAL", "totalBytes", "size"),
    Column("BOOKED", "bookedBytes", "size"),
    Column("FOREIGN", lambda device: size_words(device["foreignBytes"]) if "foreignBytes" in device else "?"),
    Column("FREE", "freeBytes", "size"),
    Column("USE", lambda device: f"{device['utilization']:.0%}" if "utilization" in device else "?"),
    Column("POWER", lambda device: f"{device['powerMilliwatts'] / 1e3:.0f}W" if "powerMilliwatts" in device else "?"),
)
_LEASE_COLUMNS = (
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
_HOST_FIELDS = ("host", "source", "seenAt", "waitingCount")
_DEVICE_FIELDS = (
    *("index", "id", "name", "totalBytes", "usedBytes", "utilization", "powerMilliwatts", "energyMillijoules"),
    *("bookedBytes", "foreignBytes", "freeBytes", "marginBytes"),
)
_LEASE_FIELDS = (
    *("id", "fencingNumber", "holder", "holderKind", "purpose", "state", "shares", "seenBytes"),
    *("unowned", "pinned", "activeRequests", "ageSeconds"),
)
"""Fields of documents in the order of `-o json`."""


def print_hosts(hosts: Sequence[Document]) -> None:
    """Prints a table of the devices, and one of the leases where there are any."""
    print_table([{**device, "host": host["host"]} for host in hosts for device in host["devices"]], _DEVICE_COLUMNS)
    leases = lease_rows(hosts)
    if leases:
        say("\n")
        print_table(leases, _LEASE_COLUMNS)


_LEASES = Listing(
    columns=_LEASE_COLUMNS,
    wide=(
        *_LEASE_COLUMNS,
        Column("USED", lambda lease: size_words(lease["seenBytes"]) if "seenBytes" in lease else "?"),
        Column("PRIORITY", "priority"),
        Column("REQUESTS", "activeRequests"),
    ),
    name=lambda lease: f"lease/{lease['leaseId']}",
    kind="LeaseList",
    plural="leases",
    empty="no accelerator memory is leased; weft lease acquire leases some, and so does each model that is loaded",
)


def show_leases(words: Sequence[str], output: ResourceFormat, home: Path, *, watch: bool = False) -> None:
    """Prints the leases that `words` name, all of them without names; `watch`: until Ctrl-C, with each that changes."""

    def unknown(name: str) -> WeftError:
        return WeftError(Reason.NOT_FOUND, f"there is no lease {name[:MAX_LEASE_ID_CHARS]}: it has ended, or never was")

    show_records(_LEASES, words, output, lambda: lease_rows(hosts_of(home)), unknown, key="leaseId", watch=watch)


def host_document(host: Document) -> Document:
    """Returns a host with its devices and leases as `weft lease list -o json` prints it."""
    return {
        **_picked(host, _HOST_FIELDS),
        "devices": [_picked(device, _DEVICE_FIELDS) for device in host["devices"]],
        "leases": [_lease_document(lease) for lease in host["leases"]],
    }


def _lease_document(lease: Document) -> Document:
    """Returns a lease with its shares, and its age instead of a time."""
    created = lease.get("createdAt")
    age = None if created is None else max(0.0, (datetime.now(UTC) - moment_in(created)).total_seconds())
    shares = [{"device": int(device), "bytes": amount} for device, amount in lease["bytesByDevice"].items()]
    own = {"id": lease["leaseId"], "shares": shares, "unowned": lease.get("unowned", False), "ageSeconds": age}
    return _picked(lease | own, _LEASE_FIELDS)


def _picked(document: Document, fields: Sequence[str]) -> Document:
    """Returns fields of a document in this order; None stands for one that it has not."""
    return {field: document.get(field) for field in fields}
