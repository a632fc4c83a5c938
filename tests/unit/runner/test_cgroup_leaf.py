"""The place of a cgroup leaf, with files that imitate cgroups: component tests use real ones."""

import os
import signal
from pathlib import Path

import pytest
from kit.failures import fails

from runner_svc.supervise.cgroup import CgroupLeaf, OutOfMemoryCount, make_leaf, own_cgroup
from runner_svc.supervise.system import LinuxSystem, PortableSystem, this_system
from weft.kernel.reasons import Reason

OWN = "/user.slice/app.slice/weft.service"


class Tree:
    """Folders and tables as on a machine with a delegated cgroup."""

    def __init__(self, folder: Path, *, own: str = OWN, root: str = "/", kind: str = "cgroup2") -> None:
        self.mounted_at = folder / "cgroup here"
        self.own = self.mounted_at / own.removeprefix(root).strip("/")
        self.own.mkdir(parents=True)
        (self.own / "cgroup.procs").write_text(f"1\n{os.getpid()}\n")
        self.membership = folder / "membership"
        self.membership.write_text(f"4:memory:/elsewhere\n0::{own}\n")
        self.mounts = folder / "mountinfo"
        place = str(self.mounted_at).replace(" ", "\\040")
        self.mounts.write_text(
            "22 1 0:20 / /proc rw,relatime - proc proc rw\n"
            f"41 31 0:38 {root} {place} rw,nosuid shared:4 - {kind} cgroup2 rw,nsdelegate\n"
        )

    def own_cgroup(self) -> Path | None:
        return own_cgroup(membership=self.membership, mount_table=self.mounts)

    def make_leaf(self) -> CgroupLeaf | None:
        return make_leaf("abc", membership=self.membership, mount_table=self.mounts)


@pytest.mark.parametrize(("own", "root"), [(OWN, "/"), (OWN, "/user.slice"), (OWN, OWN), ("/", "/")])
def test_own_cgroup_is_found_below_its_mount(own: str, root: str, tmp_path: Path) -> None:
    tree = Tree(tmp_path, own=own, root=root)
    assert tree.own_cgroup() == tree.own


def test_cgroup_that_does_not_contain_this_process_is_not_used(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    (tree.own / "cgroup.procs").write_text("1\n")
    assert tree.own_cgroup() is None


@pytest.mark.parametrize(
    "membership", ["", "4:memory:/x\n", "0::/../outside\n", f"0::{OWN}-of-somebody-else\n", "0::/user.slices\n"]
)
def test_invisible_cgroup_is_not_used(membership: str, tmp_path: Path) -> None:
    tree = Tree(tmp_path, root="/user.slice")
    tree.membership.write_text(membership)
    assert tree.own_cgroup() is None


def test_cgroup_v1_is_not_used(tmp_path: Path) -> None:
    assert Tree(tmp_path, kind="cgroup").own_cgroup() is None


def test_missing_cgroup_tables_mean_no_cgroup(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    assert own_cgroup(membership=nowhere, mount_table=nowhere) is None
    assert make_leaf("abc", membership=nowhere, mount_table=nowhere) is None


def test_kernel_without_cgroup_kill_gets_no_leaf_and_no_leftovers(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    assert tree.make_leaf() is None  # a plain folder has no files of its own, as an old kernel has no cgroup.kill
    assert [path.name for path in tree.own.iterdir()] == ["cgroup.procs"]


def test_removed_leaf_has_no_members_and_can_be_ended_again(tmp_path: Path) -> None:
    leaf = CgroupLeaf(tmp_path / "weft-gone")
    leaf.kill()
    assert leaf.members() == set()
    assert leaf.oom_kills() is None
    assert leaf.remove()


def test_leaf_with_its_own_oom_kill_count_is_trusted(tmp_path: Path) -> None:
    events = tmp_path / "memory.events"
    events.write_text("low 0\nhigh 0\nmax 3\noom 1\noom_kill 0\noom_group_kill 0\n")
    count = OutOfMemoryCount(CgroupLeaf(tmp_path))
    assert count.rose_for(signal.SIGKILL) is False
    events.write_text("low 0\nhigh 0\nmax 9\noom 2\noom_kill 1\noom_group_kill 0\n")
    assert count.rose_for(signal.SIGKILL) is True
    assert count.rose_for(signal.SIGSEGV) is False
    assert count.rose_for(None) is False
    events.unlink()
    assert count.rose_for(signal.SIGKILL) is None


def test_windows_is_refused_with_the_reason_and_an_alternative() -> None:
    with fails(Reason.UNSUPPORTED_OPERATION, "process groups", "openai_http"):
        this_system("win32")
    assert isinstance(this_system("linux"), LinuxSystem)
    assert isinstance(this_system("darwin"), PortableSystem)
