"""What somebody on a host saw of its devices: values, shared by whoever looks and whoever keeps the book."""

from dataclasses import dataclass
from enum import IntEnum


class Source(IntEnum):
    """Where figures come from; numbers as in `registry.v1.HostSighting.Source`."""

    NVML = 1
    DECLARED = 2
    UNKNOWN = 3


@dataclass(frozen=True, slots=True, order=True)
class ProcessId:
    """One process of a host for good: process ids are used again, with another start time."""

    pid: int
    start_ticks: int
    """Clock ticks after the boot of the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSnapshot:
    """One accelerator."""

    index: int
    """Its number on the host, in the order of the PCI bus."""
    id: str
    """The driver's own, or "declared-<index>"."""
    name: str
    total_bytes: int
    used_bytes: int | None = None
    """By whomever; None: nobody can tell."""
    utilization: float | None = None
    """Share of time, 0 to 1; None: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSnapshot:
    """A process that holds memory of a device, or that was asked about."""

    process: ProcessId
    alive: bool
    bytes_by_device: tuple[tuple[int, int], ...] = ()
    """(device index, bytes), in order of the devices; a device that is not there is not held."""
    memory_unknown: bool = False
    """Whether nobody can tell what it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSnapshot:
    """Everything at one moment."""

    host: str
    source: Source
    devices: tuple[DeviceSnapshot, ...] = ()
    """In order of their index; empty: the host has none, and nothing is leased there."""
    processes: tuple[ProcessSnapshot, ...] = ()
