"""Leases of accelerator memory as tables and documents: `weft lease list` and `weft get leases`."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from weft.api.registry.v1 import lease_pb2, lease_service_pb2
from weft.client._home import mesh_address
from weft.client._lease_renewal import LeaseClient
from weft.client.operations import connect_operations
from weft.documents.codec import document_of, moment_of
from weft.kernel.clock import SystemClock
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason
from weft.kernel.units import size_words
from weft_app.cli.options import ResourceFormat
from weft_app.cli.output import Column, Listing, print_table, say
from weft_app.cli.record_watch import RecordChanges, follow_readings
from weft_app.cli.templates import filled

MAX_LEASE_ID_CHARS = 128


def hosts_of(home: Path) -> list[lease_service_pb2.HostMemory]:
    """Returns the hosts with accelerators and the leases on them."""
    calls = LeaseClient(mesh_address(home, "registry"), lease_pb2.LeaseHolder())
    try:
        return calls.hosts()
    finally:
        calls.close()


def followed_hosts(home: Path) -> Iterator[list[lease_service_pb2.HostMemory]]:
    """Yields the hosts by name, at first and after every change of one. Raises as the registry's watch."""
    hosts: dict[str, lease_service_pb2.HostMemory] = {}
    is_synced = False
    with connect_operations(home=home) as operations:
        for response in operations.watch_host_memory():
            match response.WhichOneof("kind"):
                case "host":
                    hosts[response.host.host] = response.host
                case "deleted_host":
                    hosts.pop(response.deleted_host, None)
                case "synced":
                    is_synced = True
            if is_synced:
                yield [hosts[name] for name in sorted(hosts)]


class _DeviceRow(NamedTuple):
    """One row of the devices."""

    host: lease_service_pb2.HostMemory
    device: lease_service_pb2.DeviceMemory


class LeaseRow(NamedTuple):
    """One row of the leases."""

    host: lease_service_pb2.HostMemory
    lease: lease_pb2.Lease


def _power(device: lease_pb2.Device) -> str:
    return f"{device.power_milliwatts / 1e3:.0f}W" if device.HasField("power_milliwatts") else "?"


_DEVICE_COLUMNS = (
    Column("HOST", "{host.host}"),
    Column("DEVICE", "{device.device.index} {device.device.name}"),
    Column("TOTAL", "{device.device.total_bytes:size}"),
    Column("BOOKED", "{device.booked_bytes:size}"),
    Column("FOREIGN", "[{device.foreign_bytes:size}|?]"),
    Column("FREE", "{device.free_bytes:size}"),
    Column("USE", "[{device.device.utilization:.0%}|?]"),
    Column("POWER", lambda row: _power(row.device.device)),
)
_LEASE_COLUMNS = (
    Column("LEASE", "{lease.lease_id}"),
    Column("HOST", "{host.host}"),
    Column("HOLDER", "{lease.holder.name}"),
    Column("PURPOSE", "{lease.purpose}"),
    Column("STATE", lambda row: filled("{state}", row.lease) + (", unowned" if row.lease.unowned else "")),
    Column("MEMORY", lambda row: size_words(sum(share.bytes for share in row.lease.shares))),
    Column("DEVICES", lambda row: ",".join(str(share.device_index) for share in row.lease.shares)),
    Column("AGE", "[{lease.create_time:age}]", ticks=True),
    Column("ENDS", lambda row: _end_words(row.lease)),
)
_HOST_FIELDS = ("host", "source")
_DEVICE_FIELDS = (
    *("index", "id", "name", "totalBytes", "usedBytes", "utilization", "powerMilliwatts", "energyMillijoules"),
    *("bookedBytes", "foreignBytes", "freeBytes", "marginBytes"),
)
_LEASE_FIELDS = (
    *("id", "fencingNumber", "holder", "holderKind", "purpose", "state", "shares", "seenBytes"),
    *("unowned", "pinned", "activeRequests", "ageSeconds"),
)
"""Fields of documents in the order of `-o json`."""


def print_hosts(hosts: Sequence[lease_service_pb2.HostMemory]) -> None:
    """Prints a table of the devices, and one of the leases where there are any."""
    print_table([_DeviceRow(host, device) for host in hosts for device in host.devices], _DEVICE_COLUMNS)
    leases = lease_rows(hosts)
    if leases:
        say("\n")
        print_table(leases, _LEASE_COLUMNS)


def lease_rows(hosts: Sequence[lease_service_pb2.HostMemory]) -> list[LeaseRow]:
    """Returns the leases of all hosts."""
    return [LeaseRow(host, lease) for host in hosts for lease in host.leases]


def _end_words(lease: lease_pb2.Lease) -> str:
    """Returns when a lease ends; no lease has a time at which it does."""
    if lease.state != lease_pb2.Lease.STATE_HELD:
        return "when its processes have ended"
    is_of_program = lease.holder.kind == lease_pb2.LeaseHolder.KIND_PROGRAM
    return "with its program" if is_of_program else "when the model is unloaded"


_LEASES = Listing(
    columns=_LEASE_COLUMNS,
    wide=(
        *_LEASE_COLUMNS,
        Column("USED", "[{lease.seen_bytes:size}|?]"),
        Column("PRIORITY", "{lease.priority}"),
        Column("REQUESTS", "{lease.active_requests}"),
    ),
    name=lambda row: f"lease/{row.lease.lease_id}",
    kind="LeaseList",
    plural="leases",
    document=lambda row: {"kind": "lease", "host": row.host.host, **document_of(row.lease)},
    empty="no accelerator memory is leased; weft lease acquire leases some, and so does each model that is loaded",
)


def show_leases(words: Sequence[str], output: ResourceFormat, home: Path, *, watch: bool = False) -> None:
    """Prints the leases that `words` name, all of them without names; `watch`: until Ctrl-C, with each that changes."""
    if output is ResourceFormat.YAML:
        raise invalid_field("--output", "must be table, wide, json or name: leases are not declared")
    named = {word.partition("/")[2] for word in words} if "/" in words[0] else set(words[1:])

    def picked(hosts: Sequence[lease_service_pb2.HostMemory]) -> list[LeaseRow]:
        return [row for row in lease_rows(hosts) if not named or row.lease.lease_id in named]

    if watch:
        follow_readings(RecordChanges(_LEASES, output), lambda: map(picked, followed_hosts(home)))
        return
    found = picked(hosts_of(home))
    if missing := named - {row.lease.lease_id for row in found}:
        raise WeftError(
            Reason.NOT_FOUND, f"there is no lease {min(missing)[:MAX_LEASE_ID_CHARS]}: it has ended, or never was"
        )
    _LEASES.print(found, output)


def host_document(host: lease_service_pb2.HostMemory) -> dict[str, Any]:
    """Returns a host with its devices and leases as JSON types."""
    return {
        **_picked(document_of(host), _HOST_FIELDS),
        "seenAt": host.sighting_time.ToJsonString() if host.HasField("sighting_time") else None,
        "waitingCount": host.waiting_count,
        "devices": [_picked(document_of(device), _DEVICE_FIELDS) for device in host.devices],
        "leases": [_lease_document(lease) for lease in host.leases],
    }


def _lease_document(lease: lease_pb2.Lease) -> dict[str, Any]:
    """Returns a lease with its shares in their order, and its age instead of a time."""
    created = moment_of(lease, "create_time")
    age = None if created is None else max(0.0, (SystemClock().utc_now() - created).total_seconds())
    shares = [{"device": share.device_index, "bytes": share.bytes} for share in lease.shares]
    own = {"id": lease.lease_id, "shares": shares, "unowned": lease.unowned, "ageSeconds": age}
    return _picked(document_of(lease) | own, _LEASE_FIELDS)


def _picked(document: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """Returns fields of a document in this order; None stands for one that it has not."""
    return {field: document.get(field) for field in fields}
