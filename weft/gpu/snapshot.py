"""Snapshots of a host's devices and of the processes that hold their memory, and their messages."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum

from weft.api.registry.v1 import lease_pb2 as pb
from weft.kernel.errors.error_tree import invalid_field


class Source(IntEnum):
    """The source of a snapshot; numbers as in `registry.v1.HostSighting.Source`."""

    NVML = 1
    DECLARED = 2
    UNKNOWN = 3


@dataclass(frozen=True, slots=True, order=True)
class ProcessId:
    """A process of a host, identified by id and start time, since ids are reused."""

    pid: int
    start_ticks: int
    """Start time in clock ticks since the host booted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSnapshot:
    """One device at one time."""

    index: int
    """Number on the host, in PCI bus order."""
    id: str
    """The driver's id, or "declared-<index>"."""
    name: str
    total_bytes: int
    used_bytes: int | None = None
    """Memory in use by any process; None: unknown."""
    utilization: float | None = None
    """Share of time in use, 0 to 1; None: unknown."""
    power_milliwatts: int | None = None
    """Power draw; None: unknown."""
    energy_millijoules: int | None = None
    """Energy used since the driver was loaded; None: unknown, for example without a counter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """The use of one device, sampled by its runner; None: unknown."""

    mean_utilization: float | None
    """Share of the last minute, or of its sampled part, in which the device computed."""
    bytes_by_model: Mapping[str, int | None]
    """Device memory held by the processes of each model."""
    foreign_bytes: int | None
    """Device memory held by all other processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSnapshot:
    """A process that holds device memory, or that was watched."""

    process: ProcessId
    alive: bool
    bytes_by_device: tuple[tuple[int, int], ...] = ()
    """(device index, bytes), in device order; nothing is held on missing devices."""
    memory_unknown: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSnapshot:
    """The devices and processes of a host at one time."""

    host: str
    source: Source
    devices: tuple[DeviceSnapshot, ...] = ()
    """Devices in index order; empty: the host has none, and nothing is leased there."""
    processes: tuple[ProcessSnapshot, ...] = ()


MAX_DEVICES = 64
MAX_PROCESSES = 4_096
MAX_DEVICE_TEXT_CHARS = 128
"""Maximum length of a device id or name."""
MAX_DEVICE_BYTES = 16 * 1024**4
"""Maximum memory of a device, and of a process on it."""
MAX_DEVICE_MILLIWATTS = 10_000_000
"""Maximum power of a device; larger values from a driver are ignored."""
MAX_DEVICE_MILLIJOULES = 2**53
"""Maximum of a device's energy counter; larger values from a driver are ignored."""


def snapshot_message(snapshot: HostSnapshot) -> pb.HostSighting:
    """Returns a snapshot as a message. It must be within the limits, as snapshots of HostObserver are."""
    return pb.HostSighting(
        host=snapshot.host,
        source=pb.HostSighting.Source.ValueType(snapshot.source),
        devices=[device_message(device) for device in snapshot.devices],
        processes=[_process_message(process) for process in snapshot.processes],
    )


def device_message(device: DeviceSnapshot) -> pb.Device:
    """Returns a device as a message."""
    return pb.Device(
        index=device.index,
        id=device.id,
        name=device.name,
        total_bytes=device.total_bytes,
        used_bytes=device.used_bytes,
        utilization=device.utilization,
        power_milliwatts=device.power_milliwatts,
        energy_millijoules=device.energy_millijoules,
    )


def process_id_message(process: ProcessId) -> pb.ProcessId:
    """Returns a process id as a message."""
    return pb.ProcessId(pid=process.pid, start_ticks=process.start_ticks)


def bytes_messages(amounts: Iterable[tuple[int, int]]) -> list[pb.DeviceBytes]:
    """Returns (device index, bytes) as messages."""
    return [pb.DeviceBytes(device_index=index, bytes=amount) for index, amount in amounts]


def check_processes(message: pb.HostSighting, field: str) -> None:
    """Raises INVALID_ARGUMENT for processes that contradict each other or the devices. Check field rules before."""
    devices = {device.index for device in message.devices}
    processes: set[tuple[int, int]] = set()
    for at, seen in enumerate(message.processes):
        process = (seen.process.pid, seen.process.start_ticks)
        if process in processes:
            raise invalid_field(f"{field}.processes[{at}].process", "must appear only once")
        processes.add(process)
        left = set(devices)
        for share_at, share in enumerate(seen.memory):
            if share.device_index not in left:
                raise invalid_field(
                    f"{field}.processes[{at}].memory[{share_at}].device_index",
                    "must be one of the devices, and each only once",
                )
            left.remove(share.device_index)


def snapshot_from(message: pb.HostSighting) -> HostSnapshot:
    """Returns the snapshot in a valid message."""
    devices = [device_from(device) for device in message.devices]
    return HostSnapshot(
        host=message.host,
        source=Source(message.source),
        devices=tuple(sorted(devices, key=lambda device: device.index)),
        processes=tuple(_process_of(process) for process in message.processes),
    )


def device_from(message: pb.Device) -> DeviceSnapshot:
    """Returns the device in a valid message."""
    return DeviceSnapshot(
        index=message.index,
        id=message.id,
        name=message.name,
        total_bytes=message.total_bytes,
        used_bytes=message.used_bytes if message.HasField("used_bytes") else None,
        utilization=message.utilization if message.HasField("utilization") else None,
        power_milliwatts=message.power_milliwatts if message.HasField("power_milliwatts") else None,
        energy_millijoules=message.energy_millijoules if message.HasField("energy_millijoules") else None,
    )


def process_id_from(message: pb.ProcessId) -> ProcessId:
    """Returns the process id in a message."""
    return ProcessId(message.pid, message.start_ticks)


def _process_of(message: pb.SeenProcess) -> ProcessSnapshot:
    return ProcessSnapshot(
        process=process_id_from(message.process),
        alive=message.alive,
        bytes_by_device=tuple(sorted((share.device_index, share.bytes) for share in message.memory)),
        memory_unknown=message.memory_unknown,
    )


def _process_message(snapshot: ProcessSnapshot) -> pb.SeenProcess:
    return pb.SeenProcess(
        process=process_id_message(snapshot.process),
        alive=snapshot.alive,
        memory=bytes_messages(snapshot.bytes_by_device),
        memory_unknown=snapshot.memory_unknown,
    )
