"""The runner's side of a guardian: starts, watches and ends an engine with all its descendants."""

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from runner_svc.policy.engine_failures import MemoryKill
from runner_svc.supervise.cgroup import CgroupLeaf, OutOfMemoryCount
from runner_svc.supervise.guardian import KILL_ALL
from runner_svc.supervise.leftovers import TAG_VARIABLE, kill_tagged
from runner_svc.supervise.system import PortableSystem
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.services.service_lifecycle import start_task
from weft.kernel.telemetry.log import get_logger

log = get_logger("weft.process")

GUARDIAN_SECONDS = 10.0
"""Timeout for a guardian to start the engine: 20 ms on an idle machine (measured), seconds on a thrashing one."""
DEATH_CHECK_SECONDS = 0.1
REAP_PAUSE_SECONDS = 0.002
REAP_SECONDS = 5.0
"""Timeout for reaping a guardian that has closed its lifeline, which depends only on the kernel."""
ORPHAN_SECONDS = 5.0
ORPHAN_PAUSE_SECONDS = 0.02
LEAF_REMOVAL_TRIES = 50
LEAF_REMOVAL_PAUSE_SECONDS = 0.01
MAX_LINE_BYTES = 4096
_GUARDIAN = str(Path(__file__).with_name("guardian.py"))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEnd:
    """How an engine ended. Exactly one of `exit_code` and `killed_by` is set."""

    exit_code: int | None = None
    killed_by: int | None = None
    """Signal number."""
    dumped_core: bool = False
    memory_kill: MemoryKill | None = None
    """The memory that had run out, if the kernel's OOM killer ended it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """Kernel limits of a program and its descendants; Linux only."""

    memory_bytes: int | None = None
    """Private memory of each process, and total memory if they have their own cgroup; None: no limit."""
    oom_score: int = 0
    """Added to the runner's OOM score (0 to 1000): if memory runs out, the kernel kills it before the runner."""


NO_LIMITS = ProcessLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStart:
    """Command, environment and output of an engine to start."""

    argv: Sequence[str]
    env: Mapping[str, str]
    tag: str
    """Tag in its environment, which all its descendants inherit."""
    leaf: CgroupLeaf | None
    output: int
    """File descriptor of its stdout and stderr."""
    folder: Path | None = None
    """Its working folder; None: the runner's."""
    limits: ProcessLimits = NO_LIMITS


class GuardedEngine(asyncio.Protocol):
    """An engine behind its guardian. Created by `start_guarded`."""

    def __init__(self, system: PortableSystem, start: EngineStart, guardian: "subprocess.Popen[bytes]") -> None:
        loop = asyncio.get_running_loop()
        self._system = system
        self._tag = start.tag
        self._guardian = guardian
        self._transport: asyncio.Transport | None = None
        self._unread = b""
        self._oom = OutOfMemoryCount(start.leaf)
        self._started: asyncio.Future[int | OSError] = loop.create_future()
        self._closed = asyncio.Event()
        self._killed_by_us = False
        self._is_dropped = False
        """Whether the runner has killed the guardian."""
        self._refused = False
        """Whether the guardian could not start the engine, and exits."""
        self.leaf = start.leaf
        """Its cgroup leaf; None: it has none."""
        self.pid = 0
        self.ended: asyncio.Future[EngineEnd] = loop.create_future()
        self.gone = asyncio.Event()
        """Set when all its processes have ended, including its guardian."""
        self._following = start_task(self._follow(), name="guarded-engine")

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    @override
    def data_received(self, data: bytes) -> None:
        *lines, self._unread = (self._unread + data).split(b"\n")
        self._unread = self._unread[:MAX_LINE_BYTES]
        for line in lines:
            self._read_report(line.decode("ascii", "replace").split())

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._closed.set()
        self._start_is(OSError(errno.EIO, "its guardian died"))

    async def until_started(self, command: bytes) -> int:
        """Returns its process id once it runs. Raises OSError as exec and fork do, ETIMEDOUT without an answer."""
        assert self._transport is not None, "connected"
        self._transport.write(len(command).to_bytes(4, "big") + command)
        try:
            # Not wait_for: before Python 3.12 it loses a cancellation that coincides with the result.
            async with asyncio.timeout(GUARDIAN_SECONDS):
                outcome = await asyncio.shield(self._started)
        except TimeoutError:
            raise OSError(errno.ETIMEDOUT, "its guardian does not respond") from None
        if isinstance(outcome, OSError):
            raise outcome
        return outcome

    async def until_dead(self, seconds: float) -> bool:
        """Whether the engine has ended in time. Checks the process directly too, as its guardian may be frozen."""
        deadline = asyncio.get_running_loop().time() + seconds
        while not self.ended.done():
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0 or self._system.started_at(self.pid) is None:
                return left > 0
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, DEATH_CHECK_SECONDS)):
                    await asyncio.shield(self.ended)
        return True

    def members(self) -> set[int]:
        """Returns the ids of the engine and its living descendants."""
        if self.gone.is_set():
            return set()
        return self.leaf.members() if self.leaf is not None else self._system.descendants(self._guardian.pid)

    def signal_group(self, number: signal.Signals) -> None:
        """Signals the engine's process group, only while the engine runs because the group has its id."""
        if self.pid and not self.ended.done():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def kill_all(self) -> None:
        """Kills the engine and all its descendants. Idempotent."""
        self._killed_by_us = True
        if self.leaf is not None:
            self.leaf.kill()
        self.signal_group(signal.SIGKILL)
        if self._transport is not None and not self._transport.is_closing():
            # Not through the transport, which would close before the last lines of an ended guardian are read.
            with suppress(OSError):
                os.write(self._transport.get_extra_info("socket").fileno(), KILL_ALL)

    def give_up(self) -> None:
        """Cleans up after a failed or cancelled start."""
        if not self._refused and not self._closed.is_set():
            self._killed_by_us = True
            self.drop_guardian()

    def drop_guardian(self) -> None:
        """Kills a guardian that does not respond; `gone` is set once its descendants have been killed."""
        self._is_dropped = True
        for pid in self._system.descendants(self._guardian.pid):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self._guardian.kill()
        if self._transport is None:
            self._closed.set()  # it never connected

    def _read_report(self, words: list[str]) -> None:
        match words:
            case ["started", pid, entering]:
                self.pid = int(pid)
                if entering != "0" and self.leaf is not None:
                    self.leaf.remove()
                    self.leaf = None
                self._start_is(self.pid)
            case ["failed", number]:
                self._refused = True
                self._start_is(OSError(int(number), os.strerror(int(number))))
            case ["ended", how, number]:
                self._end(how, int(number))
            case ["left", *pids]:
                log.error("processes of an engine do not end", pids=pids)
            case _:
                log.error("a guardian sent an unknown line", line=" ".join(words)[:200])

    def _start_is(self, outcome: int | OSError) -> None:
        if not self._started.done():
            self._started.set_result(outcome)

    def _end(self, how: str, number: int) -> None:
        if self.ended.done():
            return
        if how == "exited":
            end = EngineEnd(exit_code=number)
        else:
            kill = None if self._killed_by_us else self._oom.kill(number)
            end = EngineEnd(killed_by=number, dumped_core=how == "dumped", memory_kill=kill)
        self.ended.set_result(end)

    async def _follow(self) -> None:
        """Waits for the guardian's end, then makes sure that no process is left."""
        try:
            await self._closed.wait()
            if self._transport is not None:
                self._transport.close()
            if self.pid and not self.ended.done():
                self._say_how_the_guardian_ended()
            self._kill_orphans_now()
            await self._reap()
            await self._until_no_orphans()
        finally:
            await self._remove_leaf()
            self._end("killed", signal.SIGKILL)
            self.gone.set()

    def _say_how_the_guardian_ended(self) -> None:
        if self._is_dropped:
            log.warning("the guardian of an engine did not answer in time, and was ended by its runner", pid=self.pid)
        else:
            log.error("the guardian of an engine died", pid=self.pid)

    async def _remove_leaf(self) -> None:
        # Newer kernels release a task's cgroup only after its parent may have reaped it.
        for _ in range(LEAF_REMOVAL_TRIES):
            if self.leaf is None or self.leaf.remove():
                return
            await asyncio.sleep(LEAF_REMOVAL_PAUSE_SECONDS)
        log.warning("the cgroup of an engine cannot be removed", path=str(self.leaf and self.leaf.path))

    def _kill_orphans_now(self) -> None:
        if self.ended.done():
            return
        if self.leaf is not None:
            self.leaf.kill()
        self.signal_group(signal.SIGKILL)

    async def _reap(self) -> None:
        deadline = asyncio.get_running_loop().time() + REAP_SECONDS
        while self._guardian.poll() is None:
            if asyncio.get_running_loop().time() > deadline:
                self._guardian.kill()
            await asyncio.sleep(REAP_PAUSE_SECONDS)

    async def _until_no_orphans(self) -> None:
        """Kills the orphans of a killed guardian: they belong to init and can only be found by their tag."""
        if self._refused or self._guardian.returncode == 0:
            return
        deadline = asyncio.get_running_loop().time() + ORPHAN_SECONDS
        while await self._kill_tagged() or (self.leaf is not None and self.leaf.members()):
            if asyncio.get_running_loop().time() > deadline:
                log.error("orphans of an engine do not end", pid=self.pid)
                return
            await asyncio.sleep(ORPHAN_PAUSE_SECONDS)

    async def _kill_tagged(self) -> set[int]:
        try:
            return await asyncio.to_thread(kill_tagged, self._system, self._tag)
        except RuntimeError:  # no thread can be started: block instead
            return kill_tagged(self._system, self._tag)


async def start_guarded(system: PortableSystem, start: EngineStart) -> GuardedEngine:
    """Starts an engine behind a guardian. Raises CONNECT_FAILED if it cannot be run; then no process is left."""
    command = b"\0".join(os.fsencode(argument) for argument in start.argv)
    engine: GuardedEngine | None = None
    try:
        ours, theirs = socket.socketpair()
        try:
            guardian = _spawn_guardian(system, start, theirs.fileno())
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        engine = GuardedEngine(system, start, guardian)
        await asyncio.get_running_loop().create_unix_connection(lambda: engine, sock=ours)
        await engine.until_started(command)
    except BaseException as error:
        if engine is not None:
            engine.give_up()
            await engine.gone.wait()
        elif start.leaf is not None:
            start.leaf.remove()
        if isinstance(error, OSError):
            raise WeftError(Reason.CONNECT_FAILED, f"cannot start {start.argv[0]}: {_why(error)}") from error
        raise
    return engine


def _spawn_guardian(system: PortableSystem, start: EngineStart, lifeline: int) -> "subprocess.Popen[bytes]":
    """Starts the guardian as a child of this thread.

    Does not use asyncio's child watchers: they need a thread, which cannot be started at the process limit.
    """
    leaf = "" if start.leaf is None else str(start.leaf.path)
    limits = start.limits
    if start.leaf is not None and limits.memory_bytes is not None:
        start.leaf.limit_memory(limits.memory_bytes)
    numbers = (str(limits.memory_bytes or 0), str(limits.oom_score))
    return subprocess.Popen(  # noqa: S603 - fixed arguments, no shell
        [sys.executable, "-I", "-S", _GUARDIAN, str(lifeline), str(os.getpid()), leaf, system.guardian_mode, *numbers],
        env={**start.env, TAG_VARIABLE: start.tag},
        stdin=subprocess.DEVNULL,
        stdout=start.output,
        stderr=start.output,
        cwd=start.folder,
        pass_fds=(lifeline,),
        start_new_session=True,
    )


def _why(error: OSError) -> str:
    words = error.strerror or str(error)
    if error.errno == errno.EAGAIN:
        return f"the limit of processes is reached ({words})"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"the limit of open files is reached ({words})"
    return words
