"""Host snapshots to and from messages, with the limits of `registry.v1.HostSighting`."""

from collections.abc import Iterable, Sequence

from weft.api.registry.v1 import lease_pb2
from weft.gpu.snapshot import DeviceSnapshot, HostSnapshot, ProcessId, ProcessSnapshot, Source
from weft.kernel.errors import invalid_field

MAX_DEVICES = 64
MAX_PROCESSES = 4_096
MAX_HOST_CHARS = 253
"""As in the domain name system."""
MAX_DEVICE_TEXT_CHARS = 128
"""Maximum length of a device's id and name."""
MAX_DEVICE_BYTES = 16 * 1024**4
"""Maximum memory of one device, and of one process on it."""
MAX_PID = 2**31 - 1

pb = lease_pb2


def snapshot_message(snapshot: HostSnapshot) -> pb.HostSighting:
    """A snapshot as a message. It must keep the limits above, as those of HostObserver do."""
    return pb.HostSighting(
        host=snapshot.host,
        source=pb.HostSighting.Source.ValueType(snapshot.source),
        devices=[device_message(device) for device in snapshot.devices],
        processes=[_process_sight_message(process) for process in snapshot.processes],
    )


def device_message(device: DeviceSnapshot) -> pb.Device:
    """A device as a message."""
    return pb.Device(
        index=device.index,
        id=device.id,
        name=device.name,
        total_bytes=device.total_bytes,
        used_bytes=device.used_bytes,
        utilization=device.utilization,
    )


def process_id_message(process: ProcessId) -> pb.ProcessId:
    """A process id as a message."""
    return pb.ProcessId(pid=process.pid, start_ticks=process.start_ticks)


def bytes_messages(amounts: Iterable[tuple[int, int]]) -> list[pb.DeviceBytes]:
    """(device index, bytes) as messages."""
    return [pb.DeviceBytes(device_index=index, bytes=amount) for index, amount in amounts]


def snapshot_from(message: pb.HostSighting, field: str = "sighting") -> HostSnapshot:
    """Reads a snapshot from a message. Raises INVALID_ARGUMENT naming the first invalid part of `field`."""
    if not 0 < len(message.host) <= MAX_HOST_CHARS or not message.host.isprintable():
        raise invalid_field(f"{field}.host", f"must be 1 to {MAX_HOST_CHARS} printable characters")
    if int(message.source) not in tuple(Source):
        raise invalid_field(f"{field}.source", "must be SOURCE_NVML, SOURCE_DECLARED or SOURCE_UNKNOWN")
    if len(message.devices) > MAX_DEVICES:
        raise invalid_field(f"{field}.devices", f"must be at most {MAX_DEVICES}")
    if len(message.processes) > MAX_PROCESSES:
        raise invalid_field(f"{field}.processes", f"must be at most {MAX_PROCESSES}")
    devices = [device_from(device, f"{field}.devices[{at}]") for at, device in enumerate(message.devices)]
    indexes: set[int] = set()
    for at, device in enumerate(devices):
        if device.index in indexes:
            raise invalid_field(f"{field}.devices[{at}].index", "must be another one for each device")
        indexes.add(device.index)
    return HostSnapshot(
        host=message.host,
        source=Source(message.source),
        devices=tuple(sorted(devices, key=lambda device: device.index)),
        processes=_processes_from(message.processes, frozenset(indexes), f"{field}.processes"),
    )


def device_from(message: pb.Device, field: str) -> DeviceSnapshot:
    """Reads a device from a message. Raises INVALID_ARGUMENT."""
    if not 0 <= message.index < MAX_DEVICES:
        raise invalid_field(f"{field}.index", f"must be 0 to {MAX_DEVICES - 1}")
    for name, text in (("id", message.id), ("name", message.name)):
        if len(text) > MAX_DEVICE_TEXT_CHARS or not text.isprintable() or (name == "id" and not text):
            raise invalid_field(f"{field}.{name}", f"must be at most {MAX_DEVICE_TEXT_CHARS} printable characters")
    _require_bytes(message.total_bytes, f"{field}.total_bytes", least=1)
    if message.HasField("used_bytes"):
        _require_bytes(message.used_bytes, f"{field}.used_bytes")
    # NaN is outside every range.
    if message.HasField("utilization") and not 0.0 <= message.utilization <= 1.0:
        raise invalid_field(f"{field}.utilization", "must be 0 to 1")
    return DeviceSnapshot(
        index=message.index,
        id=message.id,
        name=message.name,
        total_bytes=message.total_bytes,
        used_bytes=message.used_bytes if message.HasField("used_bytes") else None,
        utilization=message.utilization if message.HasField("utilization") else None,
    )


def process_id_from(message: pb.ProcessId, field: str) -> ProcessId:
    """Reads a process id from a message. Raises INVALID_ARGUMENT."""
    if not 1 <= message.pid <= MAX_PID:
        raise invalid_field(f"{field}.pid", f"must be 1 to {MAX_PID}")
    if message.start_ticks < 0:
        raise invalid_field(f"{field}.start_ticks", "must not be negative")
    return ProcessId(message.pid, message.start_ticks)


def bytes_from(messages: Sequence[pb.DeviceBytes], devices: frozenset[int], field: str) -> tuple[tuple[int, int], ...]:
    """Reads (device index, bytes) in order of the devices, each one of `devices`. Raises INVALID_ARGUMENT."""
    if len(messages) > MAX_DEVICES:
        raise invalid_field(field, f"must be at most {MAX_DEVICES}")
    amounts: dict[int, int] = {}
    for at, message in enumerate(messages):
        if message.device_index not in devices or message.device_index in amounts:
            raise invalid_field(f"{field}[{at}].device_index", "must be one of the devices, and each only once")
        _require_bytes(message.bytes, f"{field}[{at}].bytes")
        amounts[message.device_index] = message.bytes
    return tuple(sorted(amounts.items()))


def _processes_from(
    messages: Sequence[pb.SeenProcess], devices: frozenset[int], field: str
) -> tuple[ProcessSnapshot, ...]:
    found: dict[ProcessId, ProcessSnapshot] = {}
    for at, message in enumerate(messages):
        process = process_id_from(message.process, f"{field}[{at}].process")
        if process in found:
            raise invalid_field(f"{field}[{at}].process", "must be told only once")
        found[process] = ProcessSnapshot(
            process=process,
            alive=message.alive,
            bytes_by_device=bytes_from(message.memory, devices, f"{field}[{at}].memory"),
            memory_unknown=message.memory_unknown,
        )
    return tuple(found.values())


def _process_sight_message(snapshot: ProcessSnapshot) -> pb.SeenProcess:
    return pb.SeenProcess(
        process=process_id_message(snapshot.process),
        alive=snapshot.alive,
        memory=bytes_messages(snapshot.bytes_by_device),
        memory_unknown=snapshot.memory_unknown,
    )


def _require_bytes(value: int, field: str, least: int = 0) -> None:
    if not least <= value <= MAX_DEVICE_BYTES:
        raise invalid_field(field, f"must be {least} to {MAX_DEVICE_BYTES} bytes")
