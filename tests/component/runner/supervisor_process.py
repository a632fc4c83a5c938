"""A program that supervises one process as a runner does, to be killed; and what tests need to look for orphans.

`python supervisor_process.py '{"argv": [...], ...}'` prints one line of JSON once the child says FAMILY_READY, and then
what `wait` says.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import structlog

from runner_svc.policy.timeouts import StopGraces
from runner_svc.supervise import parent_death
from runner_svc.supervise.cgroup import make_leaf
from runner_svc.supervise.leftovers import Leftovers
from runner_svc.supervise.logs import LogRing
from runner_svc.supervise.process import SupervisedProcess
from runner_svc.supervise.system import LinuxSystem, PortableSystem

MARK = "WEFT_TEST_FAMILY"
FAMILY_READY = "the family is there"
START_SECONDS = 20.0
GUARDIAN_SECONDS = 2.0
POLL_SECONDS = 0.01

FAMILY = f"""
sleep 100 &
(sleep 101 &)
setsid sleep 102 &
setsid sh -c '(setsid sleep 103 &)'
(trap '' TERM; exec setsid sleep 104) &
{{ sleep 105 | cat; }} &
echo {FAMILY_READY}
wait
"""
"""A child, an orphan, a session of its own, a daemon that forked twice, one deaf to TERM, two in a pipeline; all hold
the output."""
FAMILY_SIZE = 8

SYSTEMS: dict[str, Callable[[], PortableSystem]] = {
    "cgroup": LinuxSystem,
    "guardian": lambda: LinuxSystem(cgroups=False),
    "portable": PortableSystem,
}


def writable_cgroup() -> bool:
    """Whether this process may make a cgroup of version 2."""
    leaf = make_leaf("probe")
    return leaf is not None and leaf.remove()


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A supervisor that runs, and the processes below it."""

    supervisor: "subprocess.Popen[str]"
    mark: str
    engine: psutil.Process
    guardian: psutil.Process | None
    members: frozenset[psutil.Process]

    @property
    def everybody(self) -> set[psutil.Process]:
        """Returns the processes found at the start and those with the mark now, including the guardian."""
        return {*self.members, *marked(self.mark)}

    def said(self) -> str:
        """Returns the supervisor's next line."""
        assert self.supervisor.stdout is not None
        return self.supervisor.stdout.readline().strip()


def marked(mark: str) -> set[psutil.Process]:
    """Living processes with the mark in their environment."""
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark and is_alive(process):
                found.add(process)
    return found


def is_alive(process: psutil.Process) -> bool:
    """Whether the process is alive; a zombie is not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether the condition became true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


@contextmanager
def running_family(how: str, *, script: str = FAMILY, **settings: Any) -> Iterator[Family]:
    """A supervisor with a family; all of it is gone after the block, whatever a test did."""
    mark = uuid4().hex
    plan = json.dumps({"how": how, "argv": ["sh", "-c", script], "mark": mark, **settings})
    supervisor = subprocess.Popen([sys.executable, __file__, plan], stdout=subprocess.PIPE, text=True)
    family: Family | None = None
    try:
        assert supervisor.stdout is not None
        told = json.loads(supervisor.stdout.readline())
        engine = psutil.Process(told["engine"])
        below = psutil.Process(supervisor.pid).children()
        guardian = None if engine in below else below[0]
        family = Family(
            supervisor=supervisor,
            mark=mark,
            engine=engine,
            guardian=guardian,
            members=frozenset({engine, *(guardian or engine).children(recursive=True), *marked(mark)} - {guardian}),
        )
        yield family
    finally:
        supervisor.kill()
        supervisor.communicate()
        if family is not None and family.guardian is not None:
            # It removes its cgroup, if it is let.
            guardian = family.guardian
            until(lambda: not is_alive(guardian), GUARDIAN_SECONDS)
        for process in family.everybody if family is not None else marked(mark):
            with suppress(psutil.Error):
                process.kill()


@asynccontextmanager
async def supervised(how: str, script: str = FAMILY) -> AsyncGenerator[tuple[SupervisedProcess, LogRing, str]]:
    """The same in this process: the child, its output and its mark, once it says FAMILY_READY."""
    mark, ring, ready = uuid4().hex, LogRing(), asyncio.Event()
    process = SupervisedProcess(ring, QUICK, system=SYSTEMS[how]())

    def hear(lines: list[str]) -> None:
        if FAMILY_READY in lines:
            ready.set()

    try:
        await process.start(["sh", "-c", script], env={**os.environ, MARK: mark}, on_lines=hear)
        await asyncio.wait_for(ready.wait(), START_SECONDS)
        yield process, ring, mark
    finally:
        await process.stop()
        for member in marked(mark):
            member.kill()


QUICK = StopGraces(first_term_seconds=0.2, second_term_seconds=0.2, kill_seconds=5.0)


async def _supervise(plan: dict[str, Any]) -> None:
    env = {**os.environ, MARK: plan["mark"]}
    if plan["how"] == "parent death signal alone":
        await _bypass(plan, env)
        return
    ring, ready = LogRing(), asyncio.Event()
    leftovers = Leftovers(Path(plan["state_file"])) if "state_file" in plan else None
    process = SupervisedProcess(ring, QUICK, leftovers=leftovers, system=SYSTEMS[plan["how"]]())

    def hear(lines: list[str]) -> None:
        if FAMILY_READY in lines:
            ready.set()

    try:
        await process.start(plan["argv"], env=env, on_lines=hear)
    except Exception as error:  # noqa: BLE001 - the test reads it
        _say(json.dumps({"error": str(error)}))
        return
    if plan.get("wait_for_family", True):
        await ready.wait()
    _say(json.dumps({"engine": process.pid, "containment": process.containment}))
    _say(f"{await process.wait()}, out of memory: {process.memory_kill()}")
    await process.stop()
    _say("nothing is left")
    await asyncio.Event().wait()


async def _bypass(plan: dict[str, Any], env: dict[str, str]) -> None:
    """The start of an engine without a guardian."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", str(Path(parent_death.__file__)), str(os.getpid()), *plan["argv"]),
        env=env,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert child.stdout is not None
    await child.stdout.readline()
    _say(json.dumps({"engine": child.pid}))
    await child.wait()


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _main() -> None:
    plan = json.loads(sys.argv[1])
    for file in plan.get("enter_cgroups", ()):
        Path(file).write_text(str(os.getpid()))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    asyncio.run(_supervise(plan))


if __name__ == "__main__":
    _main()
