"""The memory and processors of a machine, less what cgroups (v1, v2) forbid."""

from pathlib import Path

import pytest

from weft.kernel.machine.cgroups import limiting_cgroups
from weft.kernel.machine.machine_limits import UsableMemory, usable_memory, usable_processors

GIB = 1024**3
MACHINE = UsableMemory(total_bytes=400 * GIB, available_bytes=300 * GIB)
V1_NO_LIMIT = 9223372036854771712


def cgroup(folder: Path, **files: object) -> Path:
    """A cgroup: `memory__max="max"` is the file memory.max."""
    folder.mkdir(exist_ok=True)
    (folder / "cgroup.procs").write_text("1\n")
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")
    return folder


def test_container_and_parent_limits_apply_and_cached_files_count_as_available(tmp_path: Path) -> None:
    stat = f"anon 17\nfile {4 * GIB}\nkernel 3"
    outer = cgroup(tmp_path / "outer", memory__max=20 * GIB, memory__current=14 * GIB, memory__stat=stat)
    inner = cgroup(outer / "inner", memory__max="max", memory__current=GIB)
    assert usable_memory(MACHINE, (inner, outer)) == UsableMemory(total_bytes=20 * GIB, available_bytes=10 * GIB)


def test_memory_limit_of_cgroup_v1_applies(tmp_path: Path) -> None:
    stat = f"cache 5\ntotal_cache {GIB}\ntotal_rss 7"
    limits = {"memory__limit_in_bytes": 2 * GIB, "memory__usage_in_bytes": 2 * GIB, "memory__stat": stat}
    outer = cgroup(tmp_path / "outer", **limits)
    inner = cgroup(outer / "inner", memory__limit_in_bytes=V1_NO_LIMIT, memory__usage_in_bytes=GIB)
    assert usable_memory(MACHINE, (inner, outer)) == UsableMemory(total_bytes=2 * GIB, available_bytes=GIB)


def test_machine_without_limits_is_used_as_it_is() -> None:
    assert usable_memory(MACHINE, ()) == MACHINE


@pytest.mark.parametrize(
    ("files", "processors"),
    [
        ({"cpu__max": "150000 100000"}, 1),
        ({"cpu__max": "20000 100000"}, 1),
        ({"cpu__cfs_quota_us": "200000", "cpu__cfs_period_us": "100000"}, 2),
        ({"cpu__max": "max 100000"}, 16),
        ({"cpu__cfs_quota_us": "-1", "cpu__cfs_period_us": "100000"}, 16),
        ({"cpu__max": "9900000 100000"}, 16),
        ({"cpu__max": "5 0"}, 16),
        ({}, 16),
    ],
)
def test_quota_of_processors_is_rounded_down_and_at_least_one(
    files: dict[str, str], processors: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    assert usable_processors((cgroup(tmp_path / "own", **files),)) == processors


def test_smallest_quota_of_a_cgroup_and_its_ancestors_applies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    outer = cgroup(tmp_path / "outer", cpu__max="400000 100000")
    assert usable_processors((cgroup(outer / "inner", cpu__max="800000 100000"), outer)) == 4


@pytest.mark.parametrize(("own", "root"), [("/docker/abc", "/docker/abc"), ("/docker/abc", "/")])
def test_folders_of_a_controller_of_v1_are_found_from_inside_and_outside_a_container(
    own: str, root: str, tmp_path: Path
) -> None:
    mounted = cgroup(tmp_path / "memory")
    folder = mounted
    for part in own.removeprefix(root).split("/"):
        folder = cgroup(folder / part)
    membership, mounts = tmp_path / "membership", tmp_path / "mountinfo"
    membership.write_text(f"9:name=systemd:/\n4:memory:{own}\n1:cpu,cpuacct:/\n0::/\n")
    mounts.write_text(f"35 31 0:32 {root} {mounted} rw - cgroup cgroup rw,memory\n")
    found = limiting_cgroups("memory", membership=membership, mount_table=mounts)
    assert (found[0], found[-1]) == (folder, mounted)
    assert limiting_cgroups("cpu", membership=membership, mount_table=mounts) == ()
