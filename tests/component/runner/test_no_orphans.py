"""No process of an engine outlives it, whichever process is killed: real processes, real signals."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import pytest
import supervisor_process
from supervisor_process import (
    FAMILY_READY,
    FAMILY_SIZE,
    Family,
    is_alive,
    marked,
    running_family,
    until,
    writable_cgroup,
)

from runner_svc.policy.engine_failures import MemoryKill
from runner_svc.supervise.leftovers import Leftovers
from weft.kernel.machine.cgroups import own_cgroup

pytestmark = pytest.mark.slow("kills supervisors and looks for their orphans")

GONE_SECONDS = 2.0
"""The promise."""


needs_cgroup = pytest.mark.skipif(not writable_cgroup(), reason="no cgroup v2 that we may write")
CONTAINMENTS = [pytest.param("cgroup", marks=needs_cgroup), "guardian"]


def _nobody_is_left(family: Family) -> bool:
    return until(lambda: not any(map(is_alive, family.everybody)), GONE_SECONDS)


def _sleepers_of(mark: str, seconds: str) -> list[psutil.Process]:
    """The marked processes that have become this sleep. One that ends meanwhile is none."""
    sleepers = []
    for process in marked(mark):
        with suppress(psutil.NoSuchProcess):
            if process.cmdline() == ["sleep", seconds]:
                sleepers.append(process)
    return sleepers


def _guardian(family: Family) -> psutil.Process:
    assert family.guardian is not None
    return family.guardian


@pytest.mark.parametrize("how", CONTAINMENTS)
def test_killed_supervisor_leaves_no_process(how: str) -> None:
    with running_family(how) as family:
        assert len(family.members) == FAMILY_SIZE
        family.supervisor.kill()
        assert _nobody_is_left(family)
        assert until(lambda: not is_alive(_guardian(family)), GONE_SECONDS)


@pytest.mark.parametrize("how", CONTAINMENTS)
def test_untagged_descendant_is_killed_too(how: str) -> None:
    script = "env -i setsid sh -c 'sleep 100 & exec sleep 101' & echo the family is there; wait"
    with running_family(how, script=script) as family:
        assert until(lambda: len(_guardian(family).children(recursive=True)) == 3, GONE_SECONDS)
        members = _guardian(family).children(recursive=True)
        family.supervisor.kill()
        assert until(lambda: not any(map(is_alive, members)), GONE_SECONDS)


def test_orphan_finder_finds_orphans_without_a_guardian() -> None:
    with running_family("parent death signal alone") as family:
        family.supervisor.kill()
        assert until(lambda: not is_alive(family.engine), GONE_SECONDS)
        assert len(marked(family.mark)) >= FAMILY_SIZE - 1, "the control found no orphans"


def test_without_a_subreaper_group_and_tree_end_and_only_double_forks_survive() -> None:
    """The code for other systems, tested on Linux."""
    script = "sleep 100 & setsid sleep 101 & (setsid sleep 102 &) ; echo the family is there; wait"
    with running_family("portable", script=script) as family:
        # The last one is counted from its fork on, and is a sleep only after its exec.
        assert until(lambda: len(marked(family.mark)) == 5 and len(_sleepers_of(family.mark, "102")) == 1, GONE_SECONDS)
        lost = _sleepers_of(family.mark, "102")
        family.supervisor.kill()
        assert until(lambda: marked(family.mark) <= set(lost), GONE_SECONDS)
        assert all(map(is_alive, lost)), "it is better than its description"


@pytest.mark.parametrize("how", CONTAINMENTS)
def test_killed_guardian_leaves_no_process(how: str) -> None:
    with running_family(how) as family:
        _guardian(family).kill()
        assert family.said() == "signal SIGKILL, out of memory: None"
        assert family.said() == "nothing is left"
        assert _nobody_is_left(family)


@pytest.mark.parametrize("how", CONTAINMENTS)
def test_surviving_processes_are_swept_at_the_next_start(how: str, tmp_path: Path) -> None:
    state = tmp_path / "runner.children"
    stranger = subprocess.Popen(["sleep", "102"])
    try:
        with running_family(how, state_file=str(state)) as family:
            _kill_both(family)
            assert until(lambda: not is_alive(family.engine), GONE_SECONDS)
            orphans = {process for process in family.everybody if is_alive(process)}
            assert orphans, "nothing was left to be swept"
            killed = Leftovers(state).sweep()
            assert killed
            assert set(killed) <= {process.pid for process in orphans}, "a stranger was killed"
            assert _nobody_is_left(family)
            assert stranger.poll() is None, "a process with the name of an orphan was killed"
            assert not [leaf for leaf in _leaves(state) if leaf.exists()]
            assert Leftovers(state).sweep() == []
    finally:
        stranger.kill()
        stranger.wait()


def _kill_both(family: Family) -> None:
    # Frozen first, or whichever lives longer would do its duty.
    family.supervisor.send_signal(signal.SIGSTOP)
    _guardian(family).suspend()
    _guardian(family).kill()
    family.supervisor.kill()
    family.supervisor.wait()


def _leaves(state: Path) -> list[Path]:
    own, identity = own_cgroup(), msgspec.json.decode(state.read_bytes())["identity"]
    return [] if own is None else list(own.glob(f"weft-{identity}-*"))


def test_live_runner_of_the_same_name_keeps_its_processes(tmp_path: Path) -> None:
    state = tmp_path / "runner.children"
    with running_family("guardian", state_file=str(state)) as family:
        second = Leftovers(state)
        recorded = state.read_bytes()
        assert second.sweep() == []
        second.begin()
        assert state.read_bytes() == recorded
        assert is_alive(family.engine)


def _folder_of(controller: str) -> Path | None:
    """Where cgroups of a v1 controller can be made; most machines have v2 alone."""
    folder = Path(f"/sys/fs/cgroup/{controller}")
    return folder if os.access(folder / "cgroup.procs", os.W_OK) else None


@pytest.fixture
def limited(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A cgroup of one controller, with its limits: `(controller, {file: value})`."""
    controller, limits = request.param
    parent = _folder_of(controller)
    if parent is None:
        pytest.skip(f"no cgroup v1 of {controller} that we may write")
    folder = parent / f"weft-test-{os.getpid()}"
    folder.mkdir()
    try:
        for file, value in limits.items():
            (folder / file).write_text(value)
        yield folder
    finally:
        assert until(lambda: not (folder / "cgroup.procs").read_text(), GONE_SECONDS)
        folder.rmdir()


@pytest.mark.parametrize("limited", [("pids", {"pids.max": "1"}), ("pids", {"pids.max": "2"})], indirect=True)
def test_process_limit_is_a_failed_start_with_a_message(limited: Path) -> None:
    plan = {"how": "guardian", "argv": ["true"], "mark": "limited", "enter_cgroups": [str(limited / "cgroup.procs")]}
    program = [sys.executable, supervisor_process.__file__, json.dumps(plan)]
    ran = subprocess.run(program, check=False, capture_output=True, text=True, timeout=20)
    assert json.loads(ran.stdout)["error"] == (
        "CONNECT_FAILED: cannot start true: the limit of processes is reached (Resource temporarily unavailable)"
    )
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("limited", [("memory", {"memory.limit_in_bytes": str(150 * 2**20)})], indirect=True)
@pytest.mark.parametrize("hungry", [True, False])
def test_oom_kill_is_distinguished_from_a_manual_kill(limited: Path, hungry: bool) -> None:
    eat = f"sleep 0.2; exec {sys.executable} -S -c 'held = [bytes(range(256)) * 4096 for _ in range(400)]'"
    script = f"echo {FAMILY_READY}; {eat if hungry else 'exec sleep 100'}"
    with running_family("guardian", script=script, enter_cgroups=[str(limited / "cgroup.procs")]) as family:
        if not hungry:
            family.engine.kill()
        kill = MemoryKill.SHARED_LIMIT if hungry else None
        assert family.said() == f"signal SIGKILL, out of memory: {kill}"
