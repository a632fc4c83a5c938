"""The memory and processors that this process may use: those of the machine, less what its cgroups (v1, v2) forbid.

The only reader of these limits: sizing of models, threads of engines, `weft doctor` and the figures of a host agree.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from weft.kernel.machine.cgroups import limiting_cgroups, read_count, read_number, read_text

MICROSECONDS_PER_SECOND = 1_000_000
NANOSECONDS_PER_SECOND = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class UsableMemory:
    """Main memory in bytes. Page cache, which the kernel can drop, counts as available."""

    total_bytes: int
    available_bytes: int


def usable_memory(machine: UsableMemory | None = None, cgroups: tuple[Path, ...] | None = None) -> UsableMemory:
    """Returns the memory that this process may use.

    `machine`: the memory of the whole machine; None: read. `cgroups`: folders whose limits apply; None: detected.
    """
    if machine is None:
        found = psutil.virtual_memory()
        machine = UsableMemory(total_bytes=found.total, available_bytes=found.available)
    total, available = machine.total_bytes, machine.available_bytes
    for folder in limiting_cgroups("memory") if cgroups is None else cgroups:
        limit, used, cached = _memory_of(folder)
        # Without a limit, v1 has a number near 2^63.
        if limit is not None and used is not None and limit < machine.total_bytes:
            total, available = min(total, limit), min(available, limit - used + cached)
    return UsableMemory(total_bytes=total, available_bytes=max(0, available))


def usable_processors(cgroups: tuple[Path, ...] | None = None) -> int:
    """Returns the number of processors that this process may use at the same time, at least 1.

    The least of its affinity and the CPU quotas of its cgroups, rounded down: with more threads than its quota, an
    engine waits for throttled ones.
    """
    quota = _processor_quota(cgroups)
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, processors if quota is None else min(processors, int(quota)))


def busy_seconds() -> float | None:
    """Returns the processor time that all processes below a CPU quota have used; None: no quota applies.

    Then the busy time of the whole machine says what this process has left.
    """
    if _processor_quota(None) is None:
        return None
    for folder in limiting_cgroups("cpu"):
        if (used := read_count(folder / "cpu.stat", "usage_usec")) is not None:
            return used / MICROSECONDS_PER_SECOND
    for folder in limiting_cgroups("cpuacct"):
        if (used := read_number(folder / "cpuacct.usage")) is not None:
            return used / NANOSECONDS_PER_SECOND
    return None


def _processor_quota(cgroups: tuple[Path, ...] | None) -> float | None:
    """Returns the smallest CPU quota in processors; None: there is none."""
    quotas = (_quota_of(folder) for folder in (limiting_cgroups("cpu") if cgroups is None else cgroups))
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_of(folder: Path) -> float | None:
    both = read_text(folder / "cpu.max").split()
    if not both:
        both = [read_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    # "max" (v2) and -1 (v1) mean no quota.
    if len(both) == 2 and all(each.isdecimal() for each in both) and int(both[1]) > 0:
        return int(both[0]) / int(both[1])
    return None


def _memory_of(folder: Path) -> tuple[int | None, int | None, int]:
    """Returns the limit, the use, and the page cache in the use of a cgroup, in bytes."""
    if (limit := read_number(folder / "memory.limit_in_bytes")) is not None:
        used, cached = read_number(folder / "memory.usage_in_bytes"), read_count(folder / "memory.stat", "total_cache")
    else:
        limit, used = read_number(folder / "memory.max"), read_number(folder / "memory.current")
        cached = read_count(folder / "memory.stat", "file")
    return limit, used, cached or 0
