"""A supervised process is started, watched, drained and ended, and nothing of it stays."""

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
from kit.failures import fails
from kit.own_children import own_children
from kit.presence import present
from structlog.testing import capture_logs
from supervisor_process import (
    FAMILY,
    FAMILY_READY,
    FAMILY_SIZE,
    MARK,
    QUICK,
    SYSTEMS,
    is_alive,
    marked,
    running_family,
    supervised,
    until,
    writable_cgroup,
)

from runner_svc.backend.engine_process import ProcessBackend
from runner_svc.policy.host_memory import OOM_SCORE
from runner_svc.policy.memory_estimate import MEBIBYTE
from runner_svc.supervise.cgroup import CgroupLeaf
from runner_svc.supervise.guarded_engine import EngineStart, GuardedEngine, start_guarded
from runner_svc.supervise.leftovers import TAG_VARIABLE, Leftovers
from runner_svc.supervise.logs import LogRing
from runner_svc.supervise.process import SWEEP_SECONDS, SupervisedProcess
from weft.kernel.errors.reasons import Reason
from weft.kernel.machine.cgroups import own_cgroup

needs_cgroup = pytest.mark.skipif(not writable_cgroup(), reason="no cgroup v2 that we may write")
CONTAINMENTS = [pytest.param("cgroup", marks=needs_cgroup), "guardian"]
EVERYWHERE = [*CONTAINMENTS, "portable"]
ENVIRONMENT = dict(os.environ)
QUICK_STOP_SECONDS = QUICK.first_term_seconds + QUICK.second_term_seconds + SWEEP_SECONDS + 1.0
"""The graces that are used up, and what comes after."""


def _supervisor(how: str = "guardian") -> SupervisedProcess:
    return SupervisedProcess(LogRing(), QUICK, system=SYSTEMS[how]())


GREEDY = "import sys\nheld = []\nwhile True: held.append(bytearray(8 << 20))"


async def test_engine_over_its_host_memory_limit_dies_early_as_out_of_memory() -> None:
    engine = ProcessBackend(QUICK)  # type: ignore[abstract]  # its process alone
    started = asyncio.get_running_loop().time()
    await engine.start_process((sys.executable, "-c", GREEDY), ENVIRONMENT, limit_bytes=200 * MEBIBYTE)
    report = await engine.wait_exit()
    assert asyncio.get_running_loop().time() - started < 10.0
    assert report.reason is Reason.OUT_OF_MEMORY
    assert "it ran out of memory" in report.how
    assert "host_memory_mb: 200" in report.how
    await engine.stop()


def _oom_score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


async def test_kernel_kills_an_engine_before_the_mesh_when_out_of_memory() -> None:
    own = _oom_score(os.getpid())
    engine = ProcessBackend(QUICK)  # type: ignore[abstract]  # its process alone
    await engine.start_process(("/bin/sleep", "100"), ENVIRONMENT, limit_bytes=64 * MEBIBYTE)
    try:
        assert engine.process_id is not None
        process = psutil.Process(engine.process_id)
        assert _oom_score(engine.process_id) == min(own + OOM_SCORE, 1000)
        assert _oom_score(process.ppid()) == own
        assert process.rlimit(psutil.RLIMIT_DATA) == (64 * MEBIBYTE, 64 * MEBIBYTE)
    finally:
        await engine.stop()


@pytest.mark.parametrize("how", EVERYWHERE)
async def test_pid_is_the_engines_and_leads_its_session_and_process_group(how: str) -> None:
    async with supervised(how, f"echo $$; exec sh -c 'echo {FAMILY_READY}; exec sleep 100'") as (process, ring, _):
        assert process.pid == int(ring.last(2)[0])
        assert os.getsid(process.pid) == os.getpgid(process.pid) == process.pid
        engine = psutil.Process(process.pid)
        assert until(lambda: TAG_VARIABLE in engine.environ(), 2.0)
        assert process.member_pids() == {process.pid}
        assert process.memory_kill() is None


@pytest.mark.parametrize("how", CONTAINMENTS)
async def test_members_include_all_descendants_and_containment_is_described(how: str) -> None:
    async with supervised(how) as (process, _, mark):
        assert until(lambda: len(process.member_pids()) == FAMILY_SIZE, 2.0)
        guardian = present(psutil.Process(process.pid).parent())
        # A member that has not replaced its program yet shows no command line for a moment.
        assert until(lambda: {member.pid for member in marked(mark)} - {guardian.pid} == process.member_pids(), 2.0)
        if how == "cgroup":
            leaf = CgroupLeaf(Path(process.containment.removeprefix("cgroup ")))
            assert leaf.members() == process.member_pids()
            assert leaf.path.name in _cgroups()
            await process.stop()
            assert leaf.path.name not in _cgroups()
        else:
            assert process.containment == "guardian (sub-reaper)"


@pytest.mark.parametrize("how", EVERYWHERE)
async def test_stop_kills_a_process_that_ignores_sigterm_without_waiting_for_output_holders(how: str) -> None:
    async with supervised(how, f"trap '' TERM; {FAMILY}") as (process, _, mark):
        async with asyncio.timeout(QUICK_STOP_SECONDS):
            await process.stop()
        assert process.ended_by_us
        assert await process.wait() == "signal SIGKILL"
        if how != "portable":
            assert not marked(mark)


@pytest.mark.parametrize("how", CONTAINMENTS)
async def test_exiting_process_takes_its_descendants_along(how: str) -> None:
    script = FAMILY.removesuffix("wait\n") + "sleep 0.1; printf 'last words'; exit 3"
    async with supervised(how, script) as (process, ring, mark):
        assert await process.wait() == "exit code 3"
        assert not process.ended_by_us
        assert until(lambda: not marked(mark), 2.0)
        assert ring.last(1) == ["last words"]
        assert process.pid is None
        assert process.memory_kill() is None


async def test_exit_status_is_known_even_if_a_stop_arrives_before_it_was_read() -> None:
    hears, says = os.pipe()
    start = EngineStart(argv=("/bin/sh", "-c", "sleep 0.1; exit 3"), env=ENVIRONMENT, tag="t", leaf=None, output=says)
    engine = await start_guarded(SYSTEMS["guardian"](), start)
    guardian = present(psutil.Process(engine.pid).parent())
    # The loop hears nothing meanwhile.
    assert until(lambda: not guardian.is_running() or guardian.status() == psutil.STATUS_ZOMBIE, 5.0)
    engine.kill_all()
    await engine.gone.wait()
    assert engine.ended.result().exit_code == 3
    for end in (hears, says):
        os.close(end)


@pytest.mark.parametrize("how", CONTAINMENTS)
async def test_frozen_process_is_killed(how: str) -> None:
    async with supervised(how) as (process, _, mark):
        assert process.pid is not None
        os.killpg(process.pid, signal.SIGSTOP)
        async with asyncio.timeout(QUICK_STOP_SECONDS):
            await process.stop()
        assert not marked(mark)


@pytest.mark.slow("starts many processes")
@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGSTOP, "the guardian of an engine did not answer in time, and was ended by its runner"),
        (signal.SIGKILL, "the guardian of an engine died"),
    ],
    ids=["frozen", "killed"],
)
async def test_guardian_killed_by_its_runner_is_not_reported_as_died(number: signal.Signals, said: str) -> None:
    """At a stop under load a guardian that answered too late was logged as one that had died."""
    async with supervised("guardian") as (process, _, mark):
        guardian = present(psutil.Process(process.pid).parent())
        with capture_logs() as logs:
            guardian.send_signal(number)
            async with asyncio.timeout(QUICK_STOP_SECONDS + SWEEP_SECONDS):
                await process.stop()
        assert not marked(mark)
    assert [line["event"] for line in logs if "guardian" in line["event"]] == [said]


async def test_second_stop_does_nothing_and_concurrent_stops_share_the_work() -> None:
    async with supervised("guardian") as (process, _, mark):
        await asyncio.gather(*(process.stop() for _ in range(3)))
        await process.stop()
        assert not marked(mark)
        assert process.ended_by_us


async def test_cancelled_stop_kills_immediately() -> None:
    async with supervised("guardian", f"trap '' TERM; {FAMILY}") as (process, _, mark):
        stopping = asyncio.create_task(process.stop())
        await asyncio.sleep(0.05)
        stopping.cancel()
        with suppress(asyncio.CancelledError):
            await stopping
        assert not marked(mark)
        assert not own_children()


@pytest.mark.parametrize("how", CONTAINMENTS)
@pytest.mark.parametrize("yields", [0, 1, 2, 4, 8])
async def test_cancelled_start_leaves_nothing(how: str, yields: int, tmp_path: Path) -> None:
    process = SupervisedProcess(LogRing(), QUICK, leftovers=Leftovers(tmp_path / "r.children"), system=SYSTEMS[how]())
    mark = uuid4().hex
    starting = asyncio.create_task(process.start(["sh", "-c", FAMILY], env={**ENVIRONMENT, MARK: mark}))
    for _ in range(yields):
        await asyncio.sleep(0)
    starting.cancel()
    with suppress(asyncio.CancelledError):
        await starting
    await process.stop()
    assert not marked(mark)
    assert not own_children()


@pytest.mark.parametrize("how", EVERYWHERE)
async def test_unrunnable_program_reports_why_and_leaves_nothing(how: str, tmp_path: Path) -> None:
    no_program = tmp_path / "notes.txt"
    no_program.write_text("hello")
    process = _supervisor(how)
    for program, words in (("/nowhere/engine", "No such file or directory"), (str(no_program), "Permission denied")):
        with fails(Reason.CONNECT_FAILED) as failed:
            await process.start([program], env=ENVIRONMENT)
        assert failed.value.message == f"cannot start {program}: {words}"
    assert not own_children()
    await process.start(["true"], env=ENVIRONMENT)
    assert await process.wait() == "exit code 0"
    await process.stop()


async def test_file_descriptor_limit_is_a_failed_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> tuple[int, int]:
        raise OSError(24, os.strerror(24))

    monkeypatch.setattr("os.pipe", refuse)
    with fails(Reason.CONNECT_FAILED):
        await _supervisor().start(["true"], env=ENVIRONMENT)


async def test_failing_listener_does_not_stop_output_draining() -> None:
    ring = LogRing()
    process = SupervisedProcess(ring, QUICK)

    def fail(lines: list[str]) -> None:
        raise ValueError(lines)

    await process.start(["sh", "-c", "echo one; echo two"], env=ENVIRONMENT, on_lines=fail)
    await process.wait()
    await process.stop()
    assert ring.last(2) == ["one", "two"]


def _cgroups() -> set[str]:
    own = own_cgroup()
    return {folder.name for folder in own.glob("weft-*")} if own is not None else set()


@pytest.mark.slow("starts many processes")
def test_guardian_memory_is_small() -> None:
    """Not a matter of time: 10.7 MB resident here, most of it shared with every other Python."""
    with running_family("guardian", script=f"echo {FAMILY_READY}; sleep 100") as family:
        assert family.guardian is not None
        assert family.guardian.memory_info().rss < 16 * 2**20
        assert family.guardian.num_threads() == 1
        assert "sleep" not in " ".join(family.guardian.cmdline()), "who looks for the engine would find the guardian"
        output = {Path(f"/proc/{family.engine.pid}/fd/1").stat().st_ino}
        assert output.isdisjoint(_inodes(family.guardian.pid)), "the guardian holds the output"


def _inodes(pid: int) -> set[int]:
    return {file.stat().st_ino for file in Path(f"/proc/{pid}/fd").iterdir()}


@pytest.mark.slow("starts many processes")
def test_process_systems_agree_about_a_process() -> None:
    systems = [SYSTEMS["guardian"](), SYSTEMS["portable"]()]
    with running_family("guardian") as family:
        assert family.guardian is not None
        tree = {process.pid for process in family.guardian.children(recursive=True)}
        for system in systems:
            assert system.descendants(family.guardian.pid) == tree
            assert system.variable(family.engine.pid, MARK) == family.mark
            assert system.variable(family.engine.pid, "WEFT_NO_SUCH") is None
            assert family.engine.pid in set(system.own_processes())
            assert system.started_at(family.engine.pid) == system.started_at(family.engine.pid) is not None
            assert not system.kill_if(family.engine.pid, lambda: False)
            assert is_alive(family.engine)
        assert systems[0].kill_if(family.engine.pid, lambda: True)
        assert until(lambda: not is_alive(family.engine), 2.0)
        for system in systems:
            assert until(lambda: system.started_at(family.engine.pid) is None, 2.0)  # noqa: B023 - called at once
            assert not system.kill_if(family.engine.pid, lambda: True)


async def test_start_cancelled_while_the_guardian_connects_ends() -> None:
    """A stop waited forever."""
    for yields in range(24):
        process = _supervisor()
        starting = asyncio.create_task(process.start(["sleep", "100"], env=ENVIRONMENT))
        for _ in range(yields):
            await asyncio.sleep(0)
        starting.cancel()
        async with asyncio.timeout(10.0):
            await asyncio.wait({starting})
        await process.stop()
    assert not own_children()


async def test_start_cancelled_at_the_moment_it_succeeds_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio.wait_for of Python 3.11 drops such a cancellation, and whoever stops a load would wait for its end."""
    process = _supervisor()
    heard = GuardedEngine._start_is

    def start_is(engine: GuardedEngine, outcome: int | OSError) -> None:
        heard(engine, outcome)
        if not starting.cancelling():
            starting.cancel()

    monkeypatch.setattr(GuardedEngine, "_start_is", start_is)
    starting = asyncio.create_task(process.start(["sleep", "100"], env=ENVIRONMENT))
    await asyncio.wait({starting}, timeout=10.0)
    was_cancelled = starting.cancelled()
    await process.stop()
    assert was_cancelled
    assert not own_children()
