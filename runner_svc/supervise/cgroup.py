"""A cgroup v2 leaf around an engine, if cgroups are writable, and the kernel's count of out-of-memory kills.

A leaf contains every process that the engine starts, and `cgroup.kill` ends them atomically. It is created below the
own cgroup and enables no controllers, so the rule that inner cgroups contain no processes does not apply. Writable
cgroups are those that systemd delegates (user sessions, units with Delegate=yes) and root's; containers usually mount
theirs read-only.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PREFIX = "weft-"
MOUNT_TABLE = Path("/proc/self/mountinfo")
MEMBERSHIP = Path("/proc/self/cgroup")


class CgroupLeaf:
    """A leaf. Its name is random, so it contains no unrelated process."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def members(self) -> set[int]:
        """Returns the ids of its processes; empty if it was removed."""
        return {int(line) for line in _read(self.path / "cgroup.procs").split()}

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
        return _count(self.path / "memory.events")

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


def own_cgroup(*, membership: Path = MEMBERSHIP, mount_table: Path = MOUNT_TABLE) -> Path | None:
    """Returns the folder of the own cgroup v2; None: none is mounted, or it is outside the visible hierarchy."""
    own = next((line[3:] for line in _read(membership).splitlines() if line.startswith("0::")), None)
    if own is None or own.startswith("/.."):
        return None
    for root, mounted_at in _mounts(mount_table, "cgroup2"):
        if _below(own, root):
            folder = Path(mounted_at) / own.removeprefix(root).strip("/")
            if str(os.getpid()) in _read(folder / "cgroup.procs").split():
                return folder
    return None


class OutOfMemoryCount:
    """The kernel's count of out-of-memory kills in the smallest readable scope around an engine.

    That is its own leaf, else the memory cgroup that it shares with the runner (v2 or v1), else the whole machine.
    """

    def __init__(self, leaf: CgroupLeaf | None) -> None:
        self._leaf = leaf if leaf is not None and leaf.oom_kills() is not None else None
        self._shared = None if self._leaf else _shared_counter()
        self._before = self._read_count()

    def rose_for(self, killed_by: int | None) -> bool | None:
        """Whether the count explains the end of an engine by signal `killed_by` (None: no signal); None: unknown.

        The kernel kills with SIGKILL. With a shared count, a manual SIGKILL is misinterpreted only if another process
        of the same cgroup ran out of memory in this engine's lifetime.
        """
        if killed_by != signal.SIGKILL:
            return False
        count = self._read_count()
        return None if count is None or self._before is None else count > self._before

    def _read_count(self) -> int | None:
        if self._leaf is not None:
            return self._leaf.oom_kills()
        return None if self._shared is None else _count(self._shared)


def _shared_counter() -> Path | None:
    candidates = []
    own = own_cgroup()
    if own is not None:
        candidates.append(own / "memory.events")
    for line in _read(MEMBERSHIP).splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            for root, mounted_at in _mounts(MOUNT_TABLE, "cgroup", "memory"):
                if _below(path, root):
                    candidates.append(Path(mounted_at) / path.removeprefix(root).strip("/") / "memory.oom_control")
    candidates.append(Path("/proc/vmstat"))
    return next((file for file in candidates if _count(file) is not None), None)


def _mounts(mount_table: Path, kind: str, option: str = "") -> Iterator[tuple[str, str]]:
    """Yields the root within the hierarchy and the mount point of each mount of a kind."""
    for line in _read(mount_table).splitlines():
        place, _, rest = line.partition(" - ")
        fields, source = place.split(), rest.split()
        if len(fields) > 4 and source and source[0] == kind and (not option or option in source[-1].split(",")):
            yield fields[3], fields[4].replace("\\040", " ")


def _below(path: str, root: str) -> bool:
    return root in ("/", path) or path.startswith(f"{root}/")


def _count(file: Path) -> int | None:
    """Returns the value of `oom_kill` in a file of names and values."""
    for line in _read(file).splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.strip().isdigit():
            return int(value)
    return None


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
