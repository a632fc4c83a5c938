"""Readings of a host's devices from NVIDIA's management library (NVML), through nvidia-ml-py (`pynvml`).

Every call may block forever: `weft.gpu.observer` and `runner_svc.supervise.process_time` call them in a
SingleFlightThread. Memory is counted per card: in MIG mode the instances of a card are added up, so leases are on cards
and never on MIG instances.
"""

import ctypes
import importlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from threading import Thread
from typing import Any, TypeVar

from weft.gpu.process import process_id_of
from weft.gpu.snapshot import (
    MAX_DEVICE_BYTES,
    MAX_DEVICE_MILLIJOULES,
    MAX_DEVICE_MILLIWATTS,
    MAX_DEVICE_TEXT_CHARS,
    MAX_DEVICES,
    DeviceSnapshot,
    ProcessId,
    ProcessSnapshot,
)

LOOK_AGAIN_SECONDS = 60.0
"""Interval between checks for a missing library, since a driver may be installed at any time."""
UNNAMED_BYTES = 256 * 1024**2
"""Used memory of a card, beyond the driver's, that may belong to no listed process. More than that without a listed
process means that processes are hidden, as in a container."""
_LIBRARY = "libnvidia-ml.so.1"
_COMPUTING = "nvmlDeviceGetComputeRunningProcesses"
_OTHERS = ("nvmlDeviceGetGraphicsRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses")
_POWER, _ENERGY = "nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEnergyConsumption"
_LIST_VERSIONS = ("_v3", "_v2")
"""Suffixes of the list functions, newest first; older drivers know only the second."""
_ABSENT = (9, 12)
"""NVML's error numbers for a missing driver and library."""


def load_pynvml() -> Any:
    """Returns the initialised module. Raises OSError, ImportError or NVMLError if there is no such GPU or driver."""
    if sys.platform == "linux":
        ctypes.CDLL(_LIBRARY)  # a cheap check for the driver: importing the module takes some megabytes
    module = importlib.import_module("pynvml")
    module.nvmlInit()
    return module


class Health(Enum):
    """Outcome of a reading."""

    WELL = "well"
    ABSENT = "absent"
    """No library or driver: this host has no NVIDIA card."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlReading:
    """One reading of the library."""

    health: Health
    devices: tuple[DeviceSnapshot, ...] = ()
    """In PCI bus order, as with CUDA_DEVICE_ORDER=PCI_BUS_ID."""
    holders: tuple[ProcessSnapshot, ...] = ()
    """The processes that the library lists. One that is not alive has an id that does not run on this host."""
    names_processes: bool = False
    """Whether all processes that hold memory are in `holders`; False: unknown."""


class NvmlReader:
    """Reads NVML. Never raises; may hang."""

    def __init__(
        self, load: Callable[[], Any] = load_pynvml, monotonic_seconds: Callable[[], float] = time.monotonic
    ) -> None:
        self._load = load
        self._now = monotonic_seconds
        self._module: Any = None
        self._look_again_at = 0.0
        self._health = Health.FAILED

    def read(self) -> NvmlReading:
        """Returns a reading. After a failure, the next call initialises the library again."""
        if self._module is None and not self._find():
            return NvmlReading(health=self._health)
        try:
            return _read(self._module)
        except Exception:  # noqa: BLE001 - any failure of the library makes the figures unknown
            self._module = None
            return NvmlReading(health=Health.FAILED)

    def _find(self) -> bool:
        if self._health is Health.ABSENT and self._now() < self._look_again_at:
            return False
        try:
            self._module = self._load()
        except Exception as error:  # noqa: BLE001 - see read
            # Without library or driver there is no card; other errors mean that the library fails.
            is_absent = isinstance(error, OSError | ImportError) or getattr(error, "value", None) in _ABSENT
            self._health = Health.ABSENT if is_absent else Health.FAILED
            self._look_again_at = self._now() + LOOK_AGAIN_SECONDS
            return False
        return True


def read_within(seconds: float) -> NvmlReading | None:
    """Returns a reading of this host; None if the library did not answer in time."""
    return _within(seconds, lambda: NvmlReader().read())


def capabilities_within(seconds: float, load: Callable[[], Any] = load_pynvml) -> tuple[str, ...]:
    """Returns the compute capabilities of this host's cards, such as "8.6"; empty: none is known in time."""

    def read() -> tuple[str, ...]:
        try:
            nvml = load()
            cards = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
            pairs = {tuple(nvml.nvmlDeviceGetCudaComputeCapability(card)) for card in cards}
        except Exception:  # noqa: BLE001 - as in NvmlReader.read
            return ()
        return tuple(f"{major}.{minor}" for major, minor in sorted(pairs))

    return _within(seconds, read) or ()


_T = TypeVar("_T")


def _within(seconds: float, read: Callable[[], _T]) -> _T | None:
    """Calls the library in a thread; None if it did not answer in time."""
    found: list[_T] = []
    reading = Thread(target=lambda: found.append(read()), name="nvml", daemon=True)
    reading.start()
    reading.join(seconds)
    return found[0] if found else None


@dataclass(slots=True)
class _Card:
    handle: Any
    snapshot: DeviceSnapshot
    unnamed_from: int
    """Memory in use beyond the driver's own."""


def _read(nvml: Any) -> NvmlReading:
    handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
    handles.sort(key=lambda handle: _bus_place(nvml, handle))
    cards = [card for index, handle in enumerate(handles[:MAX_DEVICES]) if (card := _card(nvml, handle, index))]
    seen: dict[int, dict[int, int | None]] = {}
    all_listed = True
    for card in cards:
        named = _named(nvml, card.handle)
        all_listed = all_listed and named is not None
        for pid, amount in (named or {}).items():
            is_believable = amount is not None and 0 <= amount <= card.snapshot.total_bytes
            seen.setdefault(pid, {})[card.snapshot.index] = amount if is_believable else None
    holders = tuple(_holder(pid, amounts) for pid, amounts in sorted(seen.items()))
    return NvmlReading(
        health=Health.WELL,
        devices=tuple(card.snapshot for card in cards),
        holders=holders,
        names_processes=all_listed and _names_are_ours(holders, cards),
    )


def _names_are_ours(holders: tuple[ProcessSnapshot, ...], cards: list[_Card]) -> bool:
    """Whether the library lists processes by ids of this PID namespace, which it may not do in a container."""
    if holders:
        return any(holder.alive for holder in holders)
    return all(card.unnamed_from <= UNNAMED_BYTES for card in cards)


def _holder(pid: int, amounts: dict[int, int | None]) -> ProcessSnapshot:
    process = process_id_of(pid)
    return ProcessSnapshot(
        process=process or ProcessId(pid, 0),
        alive=process is not None,
        bytes_by_device=tuple((index, amount) for index, amount in sorted(amounts.items()) if amount),
        memory_unknown=None in amounts.values(),
    )


def _bus_place(nvml: Any, handle: Any) -> tuple[int, int, int]:
    place = nvml.nvmlDeviceGetPciInfo(handle)
    return place.domain, place.bus, place.device


def _card(nvml: Any, handle: Any, index: int) -> _Card | None:
    """Reads a card; None if it has no valid memory figures. Operators can declare such a card.

    The registry rejects a snapshot with impossible figures as a whole, which would lose all leases of the host.
    """
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError as error:
        if error.value == nvml.NVML_ERROR_NOT_SUPPORTED:
            return None
        raise
    if not 0 < memory.total <= MAX_DEVICE_BYTES:
        return None
    # Memory that is not free counts as used, including some hundred megabytes of the driver.
    used = memory.total - min(max(0, memory.free), memory.total)
    snapshot = DeviceSnapshot(
        index=index,
        id=_text(nvml.nvmlDeviceGetUUID(handle)) or f"device-{index}",
        name=_text(nvml.nvmlDeviceGetName(handle)),
        total_bytes=memory.total,
        used_bytes=used,
        utilization=_utilization(nvml, handle),
        power_milliwatts=_figure(nvml, _POWER, handle, MAX_DEVICE_MILLIWATTS),
        energy_millijoules=_figure(nvml, _ENERGY, handle, MAX_DEVICE_MILLIJOULES),
    )
    return _Card(handle=handle, snapshot=snapshot, unnamed_from=used - _kept_by_the_driver(nvml, handle, used))


def _kept_by_the_driver(nvml: Any, handle: Any, used: int) -> int:
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).reserved)
    except (nvml.NVMLError, AttributeError):
        # Old drivers do not report it, so unlisted memory proves nothing.
        return used


def _text(said: str) -> str:
    return "".join(character for character in said if character.isprintable())[:MAX_DEVICE_TEXT_CHARS]


def _utilization(nvml: Any, handle: Any) -> float | None:
    try:
        return float(min(1.0, max(0.0, nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0)))
    except nvml.NVMLError:
        return None


def _figure(nvml: Any, name: str, handle: Any, maximum: int) -> int | None:
    """Returns a figure of a card; None if the card or an old driver does not report it, or it is impossible."""
    try:
        value = int(getattr(nvml, name)(handle))
    except (nvml.NVMLError, AttributeError):
        return None
    return value if 0 <= value <= maximum else None


def _named(nvml: Any, handle: Any) -> dict[int, int | None] | None:
    """Returns bytes by process id, None for an unknown amount; None if the library cannot list processes."""
    computing = _listed(nvml, _COMPUTING, handle)
    if computing is None:
        return None
    parts: dict[tuple[int, int, int], int | None] = {}
    for listed in (computing, *(_listed(nvml, name, handle) or () for name in _OTHERS)):
        for process in listed:
            # A process that computes and draws is on both lists with the same figure; each MIG instance is separate.
            key = (process.pid, process.gpuInstanceId, process.computeInstanceId)
            before, amount = parts.get(key, 0), process.usedGpuMemory
            parts[key] = None if before is None or amount is None else max(before, amount)
    total: dict[int, int | None] = {}
    for (pid, _, _), amount in parts.items():
        before = total.get(pid, 0)
        total[pid] = None if before is None or amount is None else before + amount
    return total


def _listed(nvml: Any, name: str, handle: Any) -> list[Any] | None:
    """Returns one of the lists; None if the driver does not have it."""
    for version in _LIST_VERSIONS:
        try:
            return list(getattr(nvml, name + version)(handle))
        except AttributeError:
            continue
        except nvml.NVMLError as error:
            if error.value not in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                raise
    return None
