"""A supervised child process with all its descendants."""

import asyncio
import os
import secrets
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from typing_extensions import override

from runner_svc.policy.engine_failures import MemoryKill
from runner_svc.policy.timeouts import StopGraces
from runner_svc.supervise.guarded_engine import (
    NO_LIMITS,
    EngineEnd,
    EngineStart,
    GuardedEngine,
    ProcessLimits,
    start_guarded,
)
from runner_svc.supervise.leftovers import Leftovers, leaf_name
from runner_svc.supervise.logs import LogRing
from runner_svc.supervise.system import PortableSystem, this_system
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.log import get_logger

log = get_logger("weft.process")

SWEEP_SECONDS = 1.0
"""How long the guardian has to end the descendants of an ended engine before the runner does."""
LAST_OUTPUT_SECONDS = 0.2
"""Wait for the last output of a dead process; a pipe held by a descendant does not end."""
_SIGNAL_NAMES = MappingProxyType({number.value: number.name for number in signal.Signals})
"""Signal names by number; real-time signals have none."""


class SupervisedProcess:
    """A child process in its own session and group, with its output drained into a LogRing.

    It and all its descendants end when it is stopped, when it dies, and shortly after the runner's death, regardless of
    session or group (on Linux; see `system.py` for other systems). A descendant that holds the output pipe cannot delay
    that.
    """

    def __init__(
        self,
        log: LogRing,
        graces: StopGraces | None = None,
        *,
        leftovers: Leftovers | None = None,
        system: PortableSystem | None = None,
    ) -> None:
        """With `leftovers`, orphans of a runner that died together with a guardian are found at the next start."""
        self._log = log
        self._graces = graces or StopGraces()
        self._leftovers = leftovers
        self._system = system
        self._engine: GuardedEngine | None = None
        self._output: _Output | None = None
        self._stopping = asyncio.Lock()
        self.ended_by_us = False
        """Whether the process was stopped, as opposed to dying."""

    @property
    def pid(self) -> int | None:
        """The engine's process id while it runs, else None."""
        engine = self._engine
        return engine.pid if engine is not None and not engine.ended.done() else None

    @property
    def containment(self) -> str:
        """How its descendants are contained, for people."""
        engine = self._engine
        if engine is not None and engine.leaf is not None:
            return f"cgroup {engine.leaf.path}"
        return (self._system or this_system()).words

    def member_pids(self) -> set[int]:
        """Returns the ids of the process and its living descendants, without its guardian."""
        return self._engine.members() if self._engine is not None else set()

    def memory_kill(self) -> MemoryKill | None:
        """Returns the memory that had run out, if the kernel's OOM killer ended it; None: it is running, or did not."""
        engine = self._engine
        return engine.ended.result().memory_kill if engine is not None and engine.ended.done() else None

    async def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        on_lines: Callable[[list[str]], None] | None = None,
        folder: Path | None = None,
        limits: ProcessLimits = NO_LIMITS,
    ) -> None:
        """Starts `argv` with environment `env` and a tag, in `folder` (None: the runner's), within `limits`.

        Raises CONNECT_FAILED if it cannot be run, UNSUPPORTED_OPERATION on a system without process supervision.
        `on_lines` receives complete output lines as they arrive (stdout and stderr are one stream). Call it from the
        event loop's thread.
        """
        await self.stop()
        system = self._system = self._system or this_system()
        tag = self._leftovers.begin() if self._leftovers is not None else f"-:{secrets.token_hex(8)}"
        leaf = system.make_leaf(leaf_name(tag))
        self.ended_by_us = False
        try:
            readable, writable = os.pipe()
            try:
                self._output = await _drain(readable, self._log, on_lines)
                start = EngineStart(
                    argv=argv, env=env, tag=tag, leaf=leaf, output=writable, folder=folder, limits=limits
                )
                self._engine = await start_guarded(system, start)
            finally:
                os.close(writable)
        except BaseException as error:
            if leaf is not None:
                leaf.remove()
            await self._close_output()
            if isinstance(error, OSError):
                raise WeftError(Reason.CONNECT_FAILED, f"cannot start {argv[0]}: {error.strerror}") from error
            raise

    async def wait(self, last_output_seconds: float = LAST_OUTPUT_SECONDS) -> str:
        """Waits for the end of the process and its output; returns how it ended: "exit code 1", "signal SIGKILL"."""
        engine, output = self._engine, self._output
        assert engine is not None, "wait before start"
        end = await asyncio.shield(engine.ended)
        if output is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(last_output_seconds):
                    await output.ended.wait()
        return describe_end(end)

    async def stop(self) -> None:
        """Ends the process and its descendants: TERM, TERM again, KILL, each with its grace period. Idempotent.

        Takes at most these plus SWEEP_SECONDS, even if descendants hold the output. Kills immediately when cancelled.
        """
        async with self._stopping:
            engine = self._engine
            if engine is None or engine.gone.is_set():
                await self._close_output()
                return
            self.ended_by_us = self.ended_by_us or not engine.ended.done()
            try:
                await self._end_gently(engine)
            finally:
                engine.kill_all()
                await self._end_rest(engine)
                await self._close_output()

    async def _end_gently(self, engine: GuardedEngine) -> None:
        graces = self._graces
        for signal_number, grace in (
            (signal.SIGTERM, graces.first_term_seconds),
            (signal.SIGTERM, graces.second_term_seconds),
            (signal.SIGKILL, graces.kill_seconds),
        ):
            engine.signal_group(signal_number)
            # A stopped process receives TERM only when it continues.
            engine.signal_group(signal.SIGCONT)
            if await engine.until_dead(grace):
                return

    async def _end_rest(self, engine: GuardedEngine) -> None:
        for is_last in (False, True):
            with suppress(TimeoutError):
                async with asyncio.timeout(SWEEP_SECONDS):
                    await engine.gone.wait()
                return
            if is_last:
                log.error("a process or its descendants do not end", pid=engine.pid)
            else:
                engine.drop_guardian()

    async def _close_output(self) -> None:
        output, self._output = self._output, None
        if output is not None:
            # Closed without waiting for the other end: an unkillable descendant may hold it indefinitely.
            await output.close()


class _Output(asyncio.Protocol):
    """Feeds the output of a process into a LogRing."""

    def __init__(self, ring: LogRing, on_lines: Callable[[list[str]], None] | None) -> None:
        self._ring = ring
        self._on_lines = on_lines
        self._transport: asyncio.BaseTransport | None = None
        self.ended = asyncio.Event()

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    @override
    def data_received(self, data: bytes) -> None:
        self._pass_on(self._ring.feed(data))

    def _pass_on(self, lines: list[str]) -> None:
        if lines and self._on_lines is not None:
            try:
                self._on_lines(lines)
            except Exception:
                # A failing listener must not stop the draining: the process would block on its output.
                log.exception("a listener to a process's output failed")

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._pass_on(self._ring.end_line())
        self.ended.set()

    async def close(self) -> None:
        """Stops reading. Idempotent."""
        if self._transport is not None:
            self._transport.close()
            await self.ended.wait()


async def _drain(readable: int, ring: LogRing, on_lines: Callable[[list[str]], None] | None) -> _Output:
    output = _Output(ring, on_lines)
    pipe = os.fdopen(readable, "rb", buffering=0)
    try:
        await asyncio.get_running_loop().connect_read_pipe(lambda: output, pipe)
    except BaseException:
        pipe.close()
        raise
    return output


def describe_end(end: EngineEnd) -> str:
    """Describes how an engine ended."""
    if end.exit_code is not None:
        return describe_exit(end.exit_code)
    return describe_exit(-(end.killed_by or 0)) + (" (core dumped)" if end.dumped_core else "")


def describe_exit(return_code: int) -> str:
    """Describes how a process ended, by its return code."""
    if return_code >= 0:
        return f"exit code {return_code}"
    return f"signal {_SIGNAL_NAMES.get(-return_code, -return_code)}"
