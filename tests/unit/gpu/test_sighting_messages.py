"""Sightings on the wire: nothing is lost on the way, and nothing beyond the limits comes in."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.api.registry.v1 import lease_pb2
from weft.gpu.snapshot import (
    MAX_DEVICE_BYTES,
    MAX_DEVICE_MILLIJOULES,
    MAX_DEVICE_MILLIWATTS,
    MAX_DEVICES,
    MAX_PROCESSES,
    DeviceSnapshot,
    HostSnapshot,
    ProcessId,
    ProcessSnapshot,
    Source,
    check_processes,
    snapshot_from,
    snapshot_message,
)
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.schemas.field_rules import check_message

GIB = 1024**3
_BYTES = st.integers(0, MAX_DEVICE_BYTES)
_TEXT = st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=20)


@st.composite
def _sights(draw: st.DrawFn) -> HostSnapshot:
    indexes = sorted(draw(st.sets(st.integers(0, MAX_DEVICES - 1), max_size=8)))
    devices = [
        DeviceSnapshot(
            index=index,
            id=draw(_TEXT),
            name=draw(_TEXT),
            total_bytes=draw(st.integers(1, MAX_DEVICE_BYTES)),
            used_bytes=draw(st.none() | _BYTES),
            utilization=draw(st.none() | st.floats(0, 1)),
            power_milliwatts=draw(st.none() | st.integers(0, MAX_DEVICE_MILLIWATTS)),
            energy_millijoules=draw(st.none() | st.integers(0, MAX_DEVICE_MILLIJOULES)),
        )
        for index in indexes
    ]
    ids = draw(st.sets(st.tuples(st.integers(1, 2**31 - 1), st.integers(0, 2**62)), max_size=8))
    shares = st.dictionaries(st.sampled_from(indexes), _BYTES) if indexes else st.just({})
    processes = [
        ProcessSnapshot(
            process=ProcessId(*one),
            alive=draw(st.booleans()),
            bytes_by_device=tuple(sorted(draw(shares).items())),
            memory_unknown=draw(st.booleans()),
        )
        for one in ids
    ]
    source = draw(st.sampled_from(Source))
    return HostSnapshot(host=draw(_TEXT), source=source, devices=tuple(devices), processes=tuple(processes))


@given(_sights())
def test_snapshot_round_trips(sight: HostSnapshot) -> None:
    message = lease_pb2.HostSighting.FromString(snapshot_message(sight).SerializeToString())
    _check(message)
    assert snapshot_from(message) == sight


def _check(message: lease_pb2.HostSighting) -> None:
    """As the registry checks it."""
    check_message(message, "sighting")
    check_processes(message, "sighting")


def _good() -> lease_pb2.HostSighting:
    device = DeviceSnapshot(index=0, id="GPU-1", name="Card", total_bytes=8 * GIB, used_bytes=GIB, utilization=0.5)
    process = ProcessSnapshot(process=ProcessId(7, 70), alive=True, bytes_by_device=((0, GIB),))
    return snapshot_message(HostSnapshot(host="box", source=Source.NVML, devices=(device,), processes=(process,)))


Spoil = Callable[[lease_pb2.HostSighting], object]


def _set(path: str, value: object) -> Spoil:
    """Sets a member such as `devices[0].index`."""

    def spoil(message: lease_pb2.HostSighting) -> None:
        target: object = message
        *parents, last = path.replace("[0]", "").split(".")
        for parent in parents:
            target = getattr(target, parent)
            target = target[0] if parent in ("devices", "processes", "memory") else target  # type: ignore[index]
        setattr(target, last, value)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (_set("host", ""), "sighting.host"),
        (_set("host", "a\x1b[31m"), "sighting.host"),
        (_set("host", "h" * 254), "sighting.host"),
        (_set("source", 0), "sighting.source"),
        (_set("source", 9), "sighting.source"),
        (_set("devices[0].index", -1), "sighting.devices[0].index"),
        (_set("devices[0].index", 64), "sighting.devices[0].index"),
        (_set("devices[0].id", ""), "sighting.devices[0].id"),
        (_set("devices[0].name", "n" * 129), "sighting.devices[0].name"),
        (_set("devices[0].total_bytes", 0), "sighting.devices[0].total_bytes"),
        (_set("devices[0].total_bytes", MAX_DEVICE_BYTES + 1), "sighting.devices[0].total_bytes"),
        (_set("devices[0].used_bytes", -1), "sighting.devices[0].used_bytes"),
        (_set("devices[0].utilization", 1.01), "sighting.devices[0].utilization"),
        (_set("devices[0].power_milliwatts", MAX_DEVICE_MILLIWATTS + 1), "sighting.devices[0].power_milliwatts"),
        (_set("devices[0].energy_millijoules", -1), "sighting.devices[0].energy_millijoules"),
        (_set("devices[0].utilization", float("nan")), "sighting.devices[0].utilization"),
        (_set("processes[0].process.pid", 0), "sighting.processes[0].process.pid"),
        (_set("processes[0].process.start_ticks", -1), "sighting.processes[0].process.start_ticks"),
        (_set("processes[0].memory[0].device_index", 1), "sighting.processes[0].memory[0].device_index"),
        (_set("processes[0].memory[0].bytes", -1), "sighting.processes[0].memory[0].bytes"),
        (lambda message: message.devices.append(message.devices[0]), "sighting.devices[1].index"),
        (lambda message: message.processes.append(message.processes[0]), "sighting.processes[1].process"),
        (
            lambda message: message.processes[0].memory.append(message.processes[0].memory[0]),
            "sighting.processes[0].memory[1].device_index",
        ),
        (lambda message: message.devices.extend([message.devices[0]] * MAX_DEVICES), "sighting.devices"),
        (lambda message: message.processes.extend([message.processes[0]] * MAX_PROCESSES), "sighting.processes"),
    ],
)
def test_invalid_snapshot_error_names_the_field(spoil: Spoil, field: str) -> None:
    message = _good()
    _check(message)  # the negative control: without the fault it is taken
    spoil(message)
    with pytest.raises(FieldError) as refused:
        _check(message)
    assert refused.value.field == field


def test_devices_are_sorted_by_index_for_any_message_order() -> None:
    message = _good()
    message.devices.append(lease_pb2.Device(index=3, id="GPU-3", total_bytes=GIB))
    message.devices.append(lease_pb2.Device(index=1, id="GPU-2", total_bytes=GIB))
    assert [device.index for device in snapshot_from(message).devices] == [0, 1, 3]
