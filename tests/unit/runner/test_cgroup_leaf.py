"""The place of a cgroup leaf, with files that imitate cgroups: component tests use real ones."""

import os
import signal
from pathlib import Path

import pytest
from kit.failures import fails

from runner_svc.policy.engine_failures import MemoryKill
from runner_svc.supervise.cgroup import CgroupLeaf, OutOfMemoryCount, make_leaf
from runner_svc.supervise.system import LinuxSystem, PortableSystem, this_system
from weft.kernel.errors.reasons import Reason
from weft.kernel.machine.cgroups import own_cgroup

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


def counted(folder: Path, *, kills: int, reached: int) -> Path:
    """A cgroup v2 with a count of kills, and of how often it reached its own limit."""
    folder.mkdir(exist_ok=True)
    (folder / "memory.events").write_text(f"low 0\nmax 3\noom {reached}\noom_kill {kills}\noom_group_kill 0\n")
    (folder / "memory.events.local").write_text(f"low 0\nmax 3\noom {reached}\noom_kill {kills}\n")
    return folder


def test_kill_at_the_limit_of_its_own_leaf_is_told_from_another_kill(tmp_path: Path) -> None:
    outer = counted(tmp_path / "outer", kills=0, reached=0)
    leaf = counted(outer / "leaf", kills=0, reached=1)
    count = OutOfMemoryCount(CgroupLeaf(leaf), (outer,))
    assert count.kill(signal.SIGKILL) is None
    counted(leaf, kills=1, reached=2)
    assert count.kill(signal.SIGKILL) is MemoryKill.OWN_LIMIT
    assert count.kill(signal.SIGSEGV) is None
    assert count.kill(None) is None
    (leaf / "memory.events").unlink()
    assert count.kill(signal.SIGKILL) is None


@pytest.mark.parametrize("has_leaf", [True, False])
def test_kill_for_lack_of_memory_of_the_whole_machine_names_no_limit(has_leaf: bool, tmp_path: Path) -> None:
    """The kernel adds such a kill to the counts of the victim's cgroups, too; no limit was reached."""
    outer = counted(tmp_path / "outer", kills=4, reached=2)
    leaf = counted(outer / "leaf", kills=0, reached=0)
    count = OutOfMemoryCount(CgroupLeaf(leaf) if has_leaf else None, (outer,))
    counted(leaf, kills=1, reached=0)
    counted(outer, kills=5, reached=2)
    assert count.kill(signal.SIGKILL) is MemoryKill.MACHINE


def test_kill_at_the_limit_of_the_container_names_that_limit(tmp_path: Path) -> None:
    outer = counted(tmp_path / "outer", kills=0, reached=0)
    leaf = counted(outer / "leaf", kills=0, reached=0)
    count = OutOfMemoryCount(CgroupLeaf(leaf), (outer,))
    counted(leaf, kills=1, reached=0)
    counted(outer, kills=1, reached=1)
    assert count.kill(signal.SIGKILL) is MemoryKill.SHARED_LIMIT


@pytest.mark.parametrize(("reached", "kill"), [(7, MemoryKill.MACHINE), (9, MemoryKill.SHARED_LIMIT)])
def test_cgroup_v1_tells_its_limit_from_the_machine(reached: int, kill: MemoryKill, tmp_path: Path) -> None:
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 0\n")
    (tmp_path / "memory.failcnt").write_text("7\n")
    count = OutOfMemoryCount(None, (tmp_path,))
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    (tmp_path / "memory.failcnt").write_text(f"{reached}\n")
    assert count.kill(signal.SIGKILL) is kill


def test_windows_is_refused_with_the_reason_and_an_alternative() -> None:
    with fails(Reason.UNSUPPORTED_OPERATION, "process groups", "openai_http"):
        this_system("win32")
    assert isinstance(this_system("linux"), LinuxSystem)
    assert isinstance(this_system("darwin"), PortableSystem)
