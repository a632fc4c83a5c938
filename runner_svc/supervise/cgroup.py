"""A cgroup v2 leaf around one engine, where we may make one, and the kernel's count of out-of-memory kills.

A leaf holds whatever the engine starts, whatever it does, and `cgroup.kill` ends it all at once. It is made below our
own cgroup and enables no controllers, so the rule that inner cgroups hold no processes does not forbid it. Writable
are the cgroups that systemd delegates (user sessions, units with Delegate=yes) and root's; containers usually mount
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
    """One leaf. Its name is random, so nothing in it can be a stranger's."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def members(self) -> set[int]:
        """Ids of the processes in it; empty when it is gone."""
        return {int(line) for line in _read(self.path / "cgroup.procs").split()}

    def kill(self) -> None:
        """SIGKILL for every member, those that are just being forked too."""
        with suppress(OSError):
            (self.path / "cgroup.kill").write_text("1")

    def oom_kills(self) -> int | None:
        """How many members the kernel killed for want of memory; None without the memory controller."""
        return _count(self.path / "memory.events")

    def remove(self) -> bool:
        """Whether it is gone now; it stays while a member is alive. Cgroups that a member made below it go too."""
        for folder, _, _ in os.walk(self.path, topdown=False):
            with suppress(OSError):
                Path(folder).rmdir()
        return not self.path.exists()


def make_leaf(name: str, *, membership: Path = MEMBERSHIP, mount_table: Path = MOUNT_TABLE) -> CgroupLeaf | None:
    """A leaf `weft-<name>` below our own cgroup; None where there is no cgroup v2, or it is not ours to write."""
    own = own_cgroup(membership=membership, mount_table=mount_table)
    if own is None:
        return None
    leaf = CgroupLeaf(own / f"{PREFIX}{name}")
    try:
        leaf.path.mkdir()
    except OSError:
        return None
    # cgroup.kill came with Linux 5.14; without it a leaf would only be decoration. Both must be ours to write.
    if all(os.access(leaf.path / file, os.W_OK) for file in ("cgroup.kill", "cgroup.procs")):
        return leaf
    leaf.remove()
    return None


def own_cgroup(*, membership: Path = MEMBERSHIP, mount_table: Path = MOUNT_TABLE) -> Path | None:
    """The folder of the cgroup v2 that we are in; None where none is mounted, or ours lies outside what we see."""
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
    """How often the kernel killed for want of memory, as near to an engine as can be seen.

    That is its own leaf, else the memory cgroup that it shares with us (v2 or v1), else the whole machine.
    """

    def __init__(self, leaf: CgroupLeaf | None) -> None:
        self._leaf = leaf if leaf is not None and leaf.oom_kills() is not None else None
        self._shared = None if self._leaf else _shared_counter()
        self._before = self._read_count()

    def rose_for(self, killed_by: int | None) -> bool | None:
        """Whether this explains the end of an engine that signal `killed_by` ended (None: none); None: unknown.

        The kernel kills with SIGKILL. A shared count can mistake a SIGKILL by hand for it only when another process of
        the same cgroup ran out of memory in this engine's lifetime.
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
    """Root within the hierarchy and mount point of each mount of the kind."""
    for line in _read(mount_table).splitlines():
        place, _, rest = line.partition(" - ")
        fields, source = place.split(), rest.split()
        if len(fields) > 4 and source and source[0] == kind and (not option or option in source[-1].split(",")):
            yield fields[3], fields[4].replace("\\040", " ")


def _below(path: str, root: str) -> bool:
    return root in ("/", path) or path.startswith(f"{root}/")


def _count(file: Path) -> int | None:
    """The value of `oom_kill` in a file of names and values."""
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
