"""Conversion of host snapshots to and from messages. The limits are the rules of `registry.v1.HostSighting`."""

from collections.abc import Iterable

from weft.api.registry.v1 import lease_pb2 as pb
from weft.gpu.snapshot import DeviceSnapshot, HostSnapshot, ProcessId, ProcessSnapshot, Source
from weft.kernel.errors import invalid_field

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
            raise invalid_field(f"{field}.processes[{at}].process", "must be told only once")
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
