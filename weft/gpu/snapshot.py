"""A snapshot of a host's devices and of the processes that hold their memory, as values."""

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
    """A process of a host, identified by its id and start time: ids are reused, with another start time."""

    pid: int
    start_ticks: int
    """Clock ticks after the boot of the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSnapshot:
    """One device at one time."""

    index: int
    """Its number on the host, in the order of the PCI bus."""
    id: str
    """The driver's own, or "declared-<index>"."""
    name: str
    total_bytes: int
    used_bytes: int | None = None
    """Memory in use by any process; None: unknown."""
    utilization: float | None = None
    """Share of time, 0 to 1; None: unknown."""
    power_milliwatts: int | None = None
    """Power that it draws; None: unknown."""
    energy_millijoules: int | None = None
    """Energy that it has used since its driver was loaded; None: unknown, as where it has no counter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """The use of one device, as its runner samples it; None: unknown."""

    mean_utilization: float | None
    """Share of the last minute, or as much of it as was sampled, in which it computed."""
    bytes_by_model: Mapping[str, int | None]
    """Memory of it that the processes of each model hold."""
    foreign_bytes: int | None
    """Memory of it that all other processes hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSnapshot:
    """A process that holds device memory, or that was watched."""

    process: ProcessId
    alive: bool
    bytes_by_device: tuple[tuple[int, int], ...] = ()
    """(device index, bytes), in order of the devices; missing devices are not held."""
    memory_unknown: bool = False
    """Whether the memory that it holds is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSnapshot:
    """The devices and processes of a host at one time."""

    host: str
    source: Source
    devices: tuple[DeviceSnapshot, ...] = ()
    """Devices in order of their index; empty: the host has none, and nothing is leased there."""
    processes: tuple[ProcessSnapshot, ...] = ()
