"""The cgroups (v1 and v2) of this process, whose limits apply beside those of the machine."""

import os
from collections.abc import Iterator
from pathlib import Path

MOUNT_TABLE = Path("/proc/self/mountinfo")
MEMBERSHIP = Path("/proc/self/cgroup")


def own_cgroup(*, membership: Path = MEMBERSHIP, mount_table: Path = MOUNT_TABLE) -> Path | None:
    """Returns the folder of the own cgroup v2; None: none is mounted, or it is outside the visible hierarchy."""
    own = next((line[3:] for line in read_text(membership).splitlines() if line.startswith("0::")), None)
    if own is None or own.startswith("/.."):
        return None
    for folder in _folders(own, mount_table, "cgroup2"):
        if str(os.getpid()) in read_text(folder / "cgroup.procs").split():
            return folder
    return None


def limiting_cgroups(
    controller: str, *, membership: Path = MEMBERSHIP, mount_table: Path = MOUNT_TABLE
) -> tuple[Path, ...]:
    """Returns the folders whose limits of a controller (`memory`, `cpu`) apply to this process, innermost first.

    These are its own cgroup and its visible ancestors: of v1 if the controller has a hierarchy there, else of v2.
    Inside a container whose own cgroup is mounted as the root of the hierarchy, that root is all there is.
    """
    for line in read_text(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            for folder in _folders(path, mount_table, "cgroup", controller):
                if (folder / "cgroup.procs").exists():
                    return _with_ancestors(folder)
    own = own_cgroup(membership=membership, mount_table=mount_table)
    return () if own is None else _with_ancestors(own)


def read_text(file: Path) -> str:
    """Returns the text of a file of the kernel; empty if it cannot be read."""
    try:
        return file.read_text()
    except (OSError, ValueError):
        return ""


def read_number(file: Path) -> int | None:
    """Returns the number in a file; None: it has none, such as "max" in a cgroup without a limit."""
    text = read_text(file).strip()
    return int(text) if text.isdecimal() else None


def read_count(file: Path, name: str) -> int | None:
    """Returns the value of a name in a file with a name and a value per line; None: it is not there."""
    for line in read_text(file).splitlines():
        found, _, value = line.partition(" ")
        if found == name and value.strip().isdecimal():
            return int(value)
    return None


def _with_ancestors(folder: Path) -> tuple[Path, ...]:
    return tuple(each for each in (folder, *folder.parents) if (each / "cgroup.procs").exists())


def _folders(path: str, mount_table: Path, kind: str, option: str = "") -> Iterator[Path]:
    """Yields where a cgroup of a hierarchy is visible."""
    for root, mounted_at in _mounts(mount_table, kind, option):
        if root in ("/", path) or path.startswith(f"{root}/"):
            yield Path(mounted_at) / path.removeprefix(root).strip("/")


def _mounts(mount_table: Path, kind: str, option: str) -> Iterator[tuple[str, str]]:
    """Yields the root within the hierarchy and the mount point of each mount of a kind."""
    for line in read_text(mount_table).splitlines():
        place, _, rest = line.partition(" - ")
        fields, source = place.split(), rest.split()
        if len(fields) > 4 and source and source[0] == kind and (not option or option in source[-1].split(",")):
            yield fields[3], fields[4].replace("\\040", " ")
