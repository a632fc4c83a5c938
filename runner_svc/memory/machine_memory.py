"""The memory of this machine that sizes models without configuration."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from runner_svc.policy.memory_estimate import KIBIBYTE, MEBIBYTE
from runner_svc.policy.model_sizing import MachineMemory
from runner_svc.supervise.cgroup import own_cgroup

if TYPE_CHECKING:
    from runner_svc.memory.lease_manager import LeaseManager

MEMORY_TABLE = Path("/proc/meminfo")
HOST_RESERVE_SHARE = 0.05
"""Share of host memory left free by sizing: the mesh itself takes some, and other programs grow."""
MIN_HOST_RESERVE_BYTES = 512 * MEBIBYTE
_TOTAL, _AVAILABLE = "MemTotal", "MemAvailable"


def host_memory_bytes(table: Path = MEMORY_TABLE, cgroup: Path | None = None) -> int | None:
    """Returns the host memory that another model may take; None: unknown.

    This is the available memory minus a reserve, because no ledger evicts anything from it. Page cache of model files
    counts as available. `cgroup`: the own cgroup v2, whose limits apply too; None: detected.
    """
    known = _memory_table(table)
    total, available = known.get(_TOTAL), known.get(_AVAILABLE)
    if total is None or available is None:
        return None
    for folder in _with_parents(cgroup or own_cgroup()):
        limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
        if limit is not None and used is not None:
            total, available = min(total, limit), min(available, limit - used + _cached_bytes(folder))
    return max(0, available - max(MIN_HOST_RESERVE_BYTES, int(total * HOST_RESERVE_SHARE)))


def engine_memory_bytes() -> int | None:
    """Returns the maximum host memory for all engines together; None: unknown."""
    total = _memory_table(MEMORY_TABLE).get(_TOTAL)
    if total is None:
        return None
    limits = (_number(folder / "memory.max") for folder in _with_parents(own_cgroup()))
    total = min((limit for limit in limits if limit is not None), default=total)
    return max(0, total - max(MIN_HOST_RESERVE_BYTES, int(total * HOST_RESERVE_SHARE)))


async def machine_memory(leases: "LeaseManager | None") -> MachineMemory:
    """Returns the memory for sizing a runner's models; without leases no accelerator counts."""
    devices = () if leases is None else await leases.device_memory()
    return MachineMemory(devices=devices, host_bytes=await asyncio.to_thread(host_memory_bytes))


async def free_memory_bytes(leases: "LeaseManager | None") -> int | None:
    """Returns the memory available to another model without eviction; None: unknown.

    This is memory of the accelerators, or of the host if there are none.
    """
    if leases is not None and await leases.has_devices():
        return await leases.free_device_bytes()
    return await asyncio.to_thread(host_memory_bytes)


def _memory_table(file: Path) -> dict[str, int]:
    """Returns the entries of /proc/meminfo in bytes."""
    found: dict[str, int] = {}
    for line in _text(file).splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdecimal():
            found[name] = int(words[0]) * KIBIBYTE
    return found


def _with_parents(cgroup: Path | None) -> list[Path]:
    """Returns a cgroup and its ancestors, whose limits all apply."""
    if cgroup is None:
        return []
    return [folder for folder in (cgroup, *cgroup.parents) if (folder / "cgroup.procs").exists()]


def _cached_bytes(cgroup: Path) -> int:
    """Returns the page cache in a cgroup's use, which the kernel can drop."""
    for line in _text(cgroup / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == "file" and value.isdecimal():
            return int(value)
    return 0


def _number(file: Path) -> int | None:
    """Returns the number in a file; None: it has none, such as "max" in a cgroup without a limit."""
    text = _text(file).strip()
    return int(text) if text.isdecimal() else None


def _text(file: Path) -> str:
    try:
        return file.read_text("ascii")
    except (OSError, ValueError):
        return ""
