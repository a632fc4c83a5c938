"""`weft lease`: accelerator memory for programs that are no runners, and who holds what."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Annotated, Any

import typer

from weft.api.registry.v1 import lease_pb2, lease_service_pb2
from weft.client._channel import mesh_address
from weft.client._lease_renewal import LeaseCalls
from weft.client._process_tree import ProcessTree
from weft.client.leases import LeaseOptions, MemoryLease, acquired_lease, program_name
from weft.kernel.clock import SystemClock
from weft.kernel.errors import invalid_field
from weft.kernel.units import parse_size, size_words
from weft_app.cli.held_command import ending_on_signals, require_command, run_under
from weft_app.cli.options import DEFAULT_HOME, HomeOption, OutputFormat, OutputOption, naming_fields, note, reporting
from weft_app.cli.output import Column, print_document, print_table, safe_text, say, seconds_ago
from weft_app.cli.wait import parse_duration

app = typer.Typer(help="Hold accelerator memory for a program, and show who holds what.", no_args_is_help=True)

_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "bytes": "--memory",
        "devices": "--devices",
        "device_indexes": "--devices",
        "max_devices": "--max-devices",
        "priority": "--priority",
        "purpose": "--purpose",
        "wait_seconds": "--wait",
    }
)
_CLEAR_LINE = "\r\x1b[K"

MemoryOption = Annotated[
    str, typer.Option("--memory", "-m", help="How much, over all devices: 8GiB, 8GB or 8192MiB.", metavar="SIZE")
]
CommandArgument = Annotated[list[str], typer.Argument(metavar="COMMAND", help="The program and its arguments.")]
DevicesOption = Annotated[
    str, typer.Option("--devices", help="Only on these devices, by number, such as 0,1.", metavar="LIST")
]
MaxDevicesOption = Annotated[
    int, typer.Option("--max-devices", help="Split over at most so many; 0: as many as it takes.", metavar="N")
]
PriorityOption = Annotated[
    str, typer.Option("--priority", help="low, normal or high: idle models above it do not give way.", metavar="BAND")
]
WaitOption = Annotated[
    str, typer.Option("--wait", help="Longest wait for the memory, such as 30s, 10m or 2h; 0: none.", metavar="TIME")
]
PurposeOption = Annotated[
    str, typer.Option("--purpose", help="What for, for whoever waits. Default: the program.", metavar="TEXT")
]

_DEVICE_COLUMNS = (
    Column("HOST", lambda row: row["host"]),
    Column("DEVICE", lambda row: f"{row['index']} {row['name']}"),
    Column("TOTAL", lambda row: size_words(row["totalBytes"])),
    Column("BOOKED", lambda row: size_words(row["bookedBytes"])),
    Column("FOREIGN", lambda row: "?" if row["foreignBytes"] is None else size_words(row["foreignBytes"])),
    Column("FREE", lambda row: size_words(row["freeBytes"])),
)
_LEASE_COLUMNS = (
    Column("LEASE", lambda row: row["id"]),
    Column("HOST", lambda row: row["host"]),
    Column("HOLDER", lambda row: row["holder"]),
    Column("PURPOSE", lambda row: row["purpose"]),
    Column("STATE", lambda row: f"{row['state']}, unowned" if row["unowned"] else row["state"]),
    Column("MEMORY", lambda row: size_words(sum(share["bytes"] for share in row["shares"]))),
    Column("DEVICES", lambda row: ",".join(str(share["device"]) for share in row["shares"])),
    Column("AGE", lambda row: "-" if row["ageSeconds"] is None else seconds_ago(row["ageSeconds"])),
)


@app.command("acquire", context_settings={"allow_interspersed_args": False})
def acquire(
    command: CommandArgument,
    *,
    memory: MemoryOption,
    devices: DevicesOption = "",
    max_devices: MaxDevicesOption = 0,
    priority: PriorityOption = "normal",
    wait: WaitOption = "5m",
    purpose: PurposeOption = "",
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Wait for accelerator memory of this host, and run a command that has it. Ends with the command's exit status.

    The command sees only its devices (CUDA_VISIBLE_DEVICES). When the lease is lost it is ended: SIGTERM, then SIGKILL.

    Example: weft lease acquire --memory 20GiB --purpose "nightly training" --wait 2h -- python train.py
    """
    with reporting(), naming_fields(lambda field: _OPTIONS.get(field, field)):
        require_command(command)
        waiting = _Waiting()
        options = LeaseOptions(
            purpose=purpose or Path(command[0]).name,
            devices=_device_numbers(devices),
            max_devices=max_devices,
            priority=priority,
            wait_seconds=parse_duration(wait, "--wait"),
            on_waiting=waiting.show,
            name=program_name(command[0]),
        )
        amount = parse_size(memory, "--memory")
        with (
            ending_on_signals(),
            waiting,
            acquired_lease(amount, ProcessTree(), mesh_address(home, "registry"), options) as lease,
        ):
            waiting.end()
            note(_held(lease))
            status = run_under(lease, command, os.environ)
    raise typer.Exit(status)


@app.command("list")
def list_leases(home: HomeOption = DEFAULT_HOME, output: OutputOption = OutputFormat.TABLE) -> None:
    """Show the devices of every host, and who holds their memory.

    FOREIGN is what programs without a lease hold; "?" means that nobody can tell. FREE is what a new lease could get.

    Example: weft lease list
    """
    with reporting():
        calls = LeaseCalls(mesh_address(home, "registry"), lease_pb2.LeaseHolder())
        try:
            hosts = [_host_row(host) for host in calls.hosts()]
        finally:
            calls.close()
        if output is not OutputFormat.TABLE:
            print_document({"kind": "HostMemoryList", "items": hosts}, output)
        elif hosts:
            _print_tables(hosts)
        else:
            say("no host with accelerators is known\n")


def _print_tables(hosts: Sequence[dict[str, Any]]) -> None:
    print_table([{"host": host["host"], **device} for host in hosts for device in host["devices"]], _DEVICE_COLUMNS)
    leases = [{"host": host["host"], **lease} for host in hosts for lease in host["leases"]]
    if leases:
        say("\n")
        print_table(leases, _LEASE_COLUMNS)


class _Waiting:
    """Shows what is awaited: one line that changes on a terminal, a line for each change elsewhere."""

    def __init__(self) -> None:
        self._is_open = False

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def show(self, words: str) -> None:
        """It waits for this now."""
        if sys.stderr.isatty():
            sys.stderr.write(f"{_CLEAR_LINE}weft: waiting: {safe_text(words)}")
            sys.stderr.flush()
            self._is_open = True
        else:
            note(f"waiting: {safe_text(words)}")

    def end(self) -> None:
        """End the line on the terminal, where one is open."""
        if self._is_open:
            sys.stderr.write("\n")
            self._is_open = False


def _held(lease: MemoryLease) -> str:
    shares = ", ".join(f"{size_words(amount)} on device {index}" for index, amount in sorted(lease.shares.items()))
    return f"holds {shares} of {safe_text(lease.host)} (lease {lease.id}, number {lease.fencing_number})"


def _device_numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise invalid_field("--devices", "must be numbers of devices such as 0,1; see `weft lease list`")
    return [int(part) for part in parts]


def _host_row(host: lease_service_pb2.HostMemory) -> dict[str, Any]:
    return {
        "host": host.host,
        "source": lease_pb2.HostSighting.Source.Name(host.source).removeprefix("SOURCE_").lower(),
        "seenAt": host.sighting_time.ToJsonString() if host.HasField("sighting_time") else None,
        "waitingCount": host.waiting_count,
        "devices": [_device_row(device) for device in host.devices],
        "leases": [_lease_row(lease) for lease in host.leases],
    }


def _device_row(memory: lease_service_pb2.DeviceMemory) -> dict[str, Any]:
    device = memory.device
    return {
        "index": device.index,
        "id": device.id,
        "name": device.name,
        "totalBytes": device.total_bytes,
        "usedBytes": device.used_bytes if device.HasField("used_bytes") else None,
        "utilization": device.utilization if device.HasField("utilization") else None,
        "bookedBytes": memory.booked_bytes,
        "foreignBytes": memory.foreign_bytes if memory.HasField("foreign_bytes") else None,
        "freeBytes": memory.free_bytes,
        "marginBytes": memory.margin_bytes,
    }


def _lease_row(lease: lease_pb2.Lease) -> dict[str, Any]:
    created = lease.create_time.ToDatetime(tzinfo=None) if lease.HasField("create_time") else None
    now = SystemClock().utc_now().replace(tzinfo=None)
    return {
        "id": lease.lease_id,
        "fencingNumber": lease.fencing_number,
        "holder": lease.holder.name,
        "holderKind": lease_pb2.LeaseHolder.Kind.Name(lease.holder.kind).removeprefix("KIND_").lower(),
        "purpose": lease.purpose,
        "state": lease_pb2.Lease.State.Name(lease.state).removeprefix("STATE_").lower(),
        "shares": [{"device": share.device_index, "bytes": share.bytes} for share in lease.shares],
        "seenBytes": lease.seen_bytes if lease.HasField("seen_bytes") else None,
        "unowned": lease.unowned,
        "pinned": lease.pinned,
        "activeRequests": lease.active_requests,
        "ageSeconds": max(0.0, (now - created).total_seconds()) if created is not None else None,
    }
