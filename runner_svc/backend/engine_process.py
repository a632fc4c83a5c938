"""An engine process that weft starts: loading, signs of life, causes of its exit, and engine ports."""

import asyncio
import math
import random
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from typing_extensions import override

from runner_svc.backend.port import Backend, CallInfo, ExitReport
from runner_svc.policy.engine_failures import (
    LAST_LINES,
    MemoryKill,
    explain_foreign_build,
    explain_out_of_memory,
    load_cause,
)
from runner_svc.policy.host_memory import OOM_SCORE
from runner_svc.policy.memory_estimate import MEBIBYTE
from runner_svc.policy.progress import EngineUsage, LoadSample, LoadStallDetector
from runner_svc.policy.timeouts import StopGraces
from runner_svc.supervise.guarded_engine import ProcessLimits
from runner_svc.supervise.leftovers import Leftovers
from runner_svc.supervise.logs import LogRing
from runner_svc.supervise.peer_process import require_peer
from runner_svc.supervise.process import SupervisedProcess
from runner_svc.supervise.process_time import GpuTime, TreeTime, resident_bytes
from weft.gpu.process import process_id_of
from weft.gpu.snapshot import ProcessId
from weft.kernel.access.principal import KEY_VARIABLES
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason

DEATH_NOTICE_SECONDS = 0.5
"""Maximum delay between a broken connection and the exit of its process."""
LOAD_CHECK_SECONDS = 0.5
LOADING = "while it loaded"
WORKING = "while it processed the request"
_Result = TypeVar("_Result")


class ProcessBackend(Backend):
    """Base of backends with a supervised child process as their engine."""

    def __init__(
        self, graces: StopGraces, leftovers: Leftovers | None = None, load_stall_seconds: float = math.inf
    ) -> None:
        """`load_stall_seconds`: see `while_loading`."""
        self.log = LogRing()
        self.load_stall_seconds = load_stall_seconds
        self._process = SupervisedProcess(self.log, graces, leftovers=leftovers)
        self._cpu = TreeTime()
        self._gpu = GpuTime()
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        """Last output of the current process; the log spans restarts."""
        self._argv: tuple[str, ...] = ()
        self._has_answered = False
        self._limit_bytes: int | None = None

    @property
    @override
    def process_id(self) -> int | None:
        return self._process.pid

    @property
    @override
    def containment(self) -> str:
        return self._process.containment

    async def start_process(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        on_lines: Callable[[list[str]], None] | None = None,
        folder: Path | None = None,
        limit_bytes: int | None = None,
    ) -> None:
        """Starts the program, without the mesh's keys in its environment.

        `folder`: its working directory. `limit_bytes`: memory limit of each process. `on_lines` receives its output.
        Raises CONNECT_FAILED.
        """
        self._last_lines.clear()
        self._argv, self._has_answered = tuple(argv), False

        def read(lines: list[str]) -> None:
            self._last_lines.extend(lines)
            if on_lines is not None:
                on_lines(lines)

        own_environment = {name: value for name, value in environment.items() if name not in KEY_VARIABLES}
        self._limit_bytes = limit_bytes
        limits = ProcessLimits(memory_bytes=limit_bytes, oom_score=OOM_SCORE)
        await self._process.start(argv, env=own_environment, on_lines=read, folder=folder, limits=limits)

    def noting(self, call: CallInfo) -> CallInfo:
        """Returns the call with an `on_token` that also calls `note_answer`."""
        if self._has_answered:
            return call

        def on_token() -> None:
            self._has_answered = True
            call.on_token()

        return replace(call, on_token=on_token)

    def note_answer(self) -> None:
        """Records that the process has produced a result, so its program runs on this processor."""
        self._has_answered = True

    @override
    def signs(self) -> EngineUsage | None:
        pid = self._process.pid
        if pid is None:
            return None
        members = self._process.member_pids()
        return EngineUsage(cpu_seconds=self._cpu.seconds(pid, members), gpu_seconds=self._gpu.seconds(members))

    @override
    def processes(self) -> tuple[ProcessId, ...]:
        members = (process_id_of(pid) for pid in sorted(self._process.member_pids()))
        return tuple(process for process in members if process is not None)

    @override
    def resident_bytes(self) -> int | None:
        return resident_bytes([process.pid for process in self.processes()])

    async def require_peer(self, transport: asyncio.BaseTransport) -> None:
        """Returns once the program or a descendant has accepted a connection; see `peer_process.require_peer`."""
        await require_peer(transport, self._process.member_pids)

    @override
    async def wait_exit(self) -> ExitReport:
        how = await self._process.wait()
        if self._process.ended_by_us:
            await asyncio.Event().wait()  # stopped by weft: the waiting task is cancelled
        return self._report(how)

    async def stop(self) -> None:
        """See Backend.stop."""
        await self._process.stop()

    async def while_loading(self, awaited: Awaitable[_Result]) -> _Result:
        """Returns the result of `awaited`. Raises SERVER_DIED or OUT_OF_MEMORY if the process ends first.

        Raises LOAD_STALLED after `load_stall_seconds` without output and CPU time.
        """
        ready = asyncio.ensure_future(awaited)
        died = asyncio.create_task(self._process.wait())
        watch = LoadStallDetector(self._load_signs())
        try:
            while True:
                await asyncio.wait({ready, died}, timeout=LOAD_CHECK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if ready.done():
                    return ready.result()
                if died.done():
                    raise self._death(died.result(), LOADING)
                signs = self._load_signs()
                watch.observe(signs)
                if watch.stalled(signs.at_seconds, self.load_stall_seconds):
                    message = f"loading made no progress for {self.load_stall_seconds:.0f} s"
                    raise WeftError(Reason.LOAD_STALLED, message)
        finally:
            ready.cancel()
            died.cancel()

    async def explain_break(self, reason: Reason | None = None) -> WeftError | None:
        """Returns the error for a broken connection if the process has ended; None: it is running."""
        del reason
        try:
            async with asyncio.timeout(DEATH_NOTICE_SECONDS):
                how = await self._process.wait()
        except TimeoutError:
            return None
        if self._process.ended_by_us:
            return WeftError(Reason.WORKER_RESTARTED, "the engine was stopped while it processed the request")
        return self._death(how, WORKING)

    def _load_signs(self) -> LoadSample:
        pid = self._process.pid
        cpu_seconds = 0.0 if pid is None else self._cpu.seconds(pid, self._process.member_pids())
        return LoadSample(asyncio.get_running_loop().time(), self.log.total_bytes, cpu_seconds)

    def _report(self, how: str) -> ExitReport:
        kill = self._process.memory_kill()
        why = explain_out_of_memory(how, list(self._last_lines), kill=kill)
        if why is not None:
            limit = ""
            if self._limit_bytes is not None and kill in (None, MemoryKill.OWN_LIMIT):
                limit = f" (host_memory_mb: {self._limit_bytes // MEBIBYTE:,})"
            return ExitReport(reason=Reason.OUT_OF_MEMORY, how=f"{why}{limit}", exit=how)
        foreign = explain_foreign_build(how, self._argv, has_answered=self._has_answered)
        return ExitReport(reason=Reason.SERVER_DIED, how=foreign or how, exit=how)

    def _death(self, how: str, when: str) -> WeftError:
        report = self._report(how)
        is_known = when != LOADING or report.how != report.exit
        cause = "" if is_known else load_cause(tuple(self._last_lines))
        error = WeftError(report.reason, f"the engine died {when} ({report.how}{': ' + cause if cause else ''})")
        error.engine_exit = report.exit
        return error


FIRST_PORT, LAST_PORT = 1024, 65_535
MAX_PORTS = 4096
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class PortRange:
    """An inclusive range of ports."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"


class EnginePorts:
    """Assigns ports of a range to the engines of one runner."""

    def __init__(self, ports: PortRange) -> None:
        self._range = ports
        self._taken: set[int] = set()

    def take(self, avoid: Container[int] = ()) -> int:
        """Returns a free port; the caller must give it back. Blocks for microseconds per occupied port.

        Another program may bind the port before the engine does. Raises CONNECT_FAILED if no port is free.
        """
        for port in range(self._range.first, self._range.last + 1):
            if port not in self._taken and port not in avoid and _is_free(port):
                self._taken.add(port)
                return port
        raise WeftError(
            Reason.CONNECT_FAILED,
            f"no port of port_range {self._range} is free for another engine; unload a model or widen the range",
        )

    def give_back(self, port: int) -> None:
        """Frees the port of an engine that has ended. Idempotent."""
        self._taken.discard(port)


FREE_PORTS = range(20_000, 32_000)
"""Below the ephemeral ports, which the system may assign to another program while an engine loads."""
MAX_FREE_PORT_TRIES = 100


def free_port() -> int:
    """Returns a port that is free now; another program may still bind it. Raises CONNECT_FAILED."""
    # Not the shared generator: runners with the same seed would all try the same ports.
    for port in random.SystemRandom().sample(FREE_PORTS, MAX_FREE_PORT_TRIES):
        # Without SO_REUSEADDR, a port that a server has bound but does not listen on yet counts as occupied.
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port
    raise WeftError(Reason.CONNECT_FAILED, f"none of {MAX_FREE_PORT_TRIES} ports was free for an engine")


def parse_port_range(text: str, field: str = "port_range") -> PortRange:
    """Parses a range such as "41000-41099". Raises INVALID_ARGUMENT naming `field`."""
    first, dash, last = text.partition("-")
    if not (dash and first.isascii() and last.isascii() and first.isdigit() and last.isdigit()):
        raise invalid_field(field, "must be two ports joined by '-', such as 41000-41099")
    # Longer numbers are not ports, and parsing an arbitrarily long number takes time.
    low, high = (int(number) if len(number) <= 5 else LAST_PORT + 1 for number in (first, last))
    if not FIRST_PORT <= low <= high <= LAST_PORT:
        raise invalid_field(field, f"must be from {FIRST_PORT} to {LAST_PORT}, the lower port first")
    if high - low >= MAX_PORTS:
        raise invalid_field(field, f"must be at most {MAX_PORTS} ports")
    return PortRange(first=low, last=high)


def _is_free(port: int) -> bool:
    """Whether a port can be bound with SO_REUSEADDR, which engines use too; a port just closed counts as free."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True
