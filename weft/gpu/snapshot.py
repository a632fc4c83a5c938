"""Snapshots of a host's devices and of the processes that hold their memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum


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
