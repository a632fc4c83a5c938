"""A cgroup v2 leaf around an engine, if cgroups are writable, and the kernel's count of out-of-memory kills.

A leaf contains every process that the engine starts, and `cgroup.kill` ends them atomically. It is created below the
own cgroup and enables no controllers, so the rule that inner cgroups contain no processes does not apply. Writable
cgroups are those that systemd delegates (user sessions, units with Delegate=yes) and root's; containers usually mount
theirs read-only.
"""

import os
import signal
from contextlib import suppress
from pathlib import Path

from runner_svc.policy.engine_failures import MemoryKill
from weft.kernel.machine.cgroups import (
    MEMBERSHIP,
    MOUNT_TABLE,
    limiting_cgroups,
    own_cgroup,
    read_count,
    read_number,
    read_text,
)

PREFIX = "weft-"
MACHINE_COUNTER = Path("/proc/vmstat")


class CgroupLeaf:
    """A leaf. Its name is random, so it contains no unrelated process."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def members(self) -> set[int]:
        """Returns the ids of its processes; empty if it was removed."""
        return {int(line) for line in read_text(self.path / "cgroup.procs").split()}

    def kill(self) -> None:
        """Sends SIGKILL to every member, including those that are being forked."""
        with suppress(OSError):
            (self.path / "cgroup.kill").write_text("1")

    def limit_memory(self, limit_bytes: int) -> None:
        """Limits the memory of all members together, if the memory controller is enabled."""
        with suppress(OSError):
            (self.path / "memory.max").write_text(str(limit_bytes))
            (self.path / "memory.oom.group").write_text("1")

    def oom_kills(self) -> int | None:
        """Returns the number of members that the kernel's OOM killer ended; None without the memory controller."""
        return read_count(self.path / "memory.events", "oom_kill")

    def remove(self) -> bool:
        """Removes it and the cgroups below it. Returns whether it is gone; it stays while a member is alive."""
        for folder, _, _ in os.walk(self.path, topdown=False):
            with suppress(OSError):
                Path(folder).rmdir()
        return not self.path.exists()


def make_leaf(name: str, *, membership: Path = MEMBERSHIP, mount_table: Path = MOUNT_TABLE) -> CgroupLeaf | None:
    """Creates a leaf `weft-<name>` below the own cgroup; None if cgroup v2 is missing or not writable."""
    own = own_cgroup(membership=membership, mount_table=mount_table)
    if own is None:
        return None
    leaf = CgroupLeaf(own / f"{PREFIX}{name}")
    try:
        leaf.path.mkdir()
    except OSError:
        return None
    # A leaf is useless without cgroup.kill (Linux 5.14). Both files must be writable.
    if all(os.access(leaf.path / file, os.W_OK) for file in ("cgroup.kill", "cgroup.procs")):
        return leaf
    leaf.remove()
    return None


class OutOfMemoryCount:
    """The kernel's counts of out-of-memory kills in the smallest readable scope around an engine.

    That is its own leaf, else the memory cgroup that it shares with the runner (v2 or v1), else the whole machine. The
    count of a cgroup includes kills because the whole machine ran out of memory, so the counts of reached limits, of
    the cgroup and of its ancestors, tell both apart.
    """

    def __init__(self, leaf: CgroupLeaf | None, cgroups: tuple[Path, ...] | None = None) -> None:
        """`cgroups`: those around this process whose memory limits apply, innermost first; None: detected."""
        around = limiting_cgroups("memory") if cgroups is None else cgroups
        self._leaf = leaf.path if leaf is not None and leaf.oom_kills() is not None else None
        self._around = around if self._leaf is None else tuple(each for each in around if each in self._leaf.parents)
        self._before = self._kills()
        self._limits_before = self._limits()

    def kill(self, killed_by: int | None) -> MemoryKill | None:
        """Returns which memory ran out, if that explains an end by signal `killed_by` (None: no signal); else None.

        The kernel kills with SIGKILL. With a shared count, a manual SIGKILL is misinterpreted only if another process
        of the same cgroup ran out of memory in this engine's lifetime.
        """
        if killed_by != signal.SIGKILL:
            return None
        kills, before = self._kills(), self._before
        if kills is None or before is None or kills <= before:
            return None
        reached = [now > earlier for now, earlier in zip(self._limits(), self._limits_before, strict=True)]
        if self._leaf is not None and reached.pop(0):
            return MemoryKill.OWN_LIMIT
        if any(reached):
            return MemoryKill.SHARED_LIMIT
        return MemoryKill.MACHINE if self._leaf is not None or self._around else MemoryKill.UNKNOWN

    def _kills(self) -> int | None:
        for folder in (self._leaf,) if self._leaf is not None else self._around[:1]:
            for file in ("memory.events", "memory.oom_control"):
                if (found := read_count(folder / file, "oom_kill")) is not None:
                    return found
        return None if self._leaf is not None else read_count(MACHINE_COUNTER, "oom_kill")

    def _limits(self) -> list[int]:
        """Returns how often each cgroup reached its own limit, the leaf first if there is one."""
        folders = self._around if self._leaf is None else (self._leaf, *self._around)
        return [_reached(folder) for folder in folders]


def _reached(folder: Path) -> int:
    """Returns how often a cgroup itself, not one below it, ran out of memory at its limit.

    v1 counts each allocation that met the limit, also those for which page cache was dropped.
    """
    events = read_count(folder / "memory.events.local", "oom")
    return (read_number(folder / "memory.failcnt") or 0) if events is None else events
