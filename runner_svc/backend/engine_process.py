"""The process of an engine that weft starts: how it loads, what it does, and why it ended."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from runner_svc.backend.port import CallInfo, ExitReport, ProcessSigns
from runner_svc.policy.engine_failures import LAST_LINES, explain_foreign_build, explain_out_of_memory
from runner_svc.policy.progress import LoadSample, LoadStallDetector
from runner_svc.supervise.leftovers import Leftovers
from runner_svc.supervise.logs import LogRing
from runner_svc.supervise.process import StopGraces, SupervisedProcess
from runner_svc.supervise.process_time import GpuTime, TreeTime
from weft.gpu.process import process_id_of
from weft.gpu.snapshot import ProcessId
from weft.kernel.errors import WeftError
from weft.kernel.principal import KEY_VARIABLES
from weft.kernel.reasons import Reason

DEATH_NOTICE_SECONDS = 0.5
"""How long a broken connection may precede the process's exit."""
LOAD_CHECK_SECONDS = 0.5
CRASH_LOG_LINES = 5
LOADING = "while it loaded"
WORKING = "while it worked on the request"
_Result = TypeVar("_Result")


def _unknown() -> None:
    """Load progress of an engine that does not report it."""


class EngineProcess:
    """A supervised process with the parts of the Backend port that are the same for every engine."""

    def __init__(self, graces: StopGraces, gpu: GpuTime | None = None, leftovers: Leftovers | None = None) -> None:
        self.log = LogRing()
        self._process = SupervisedProcess(self.log, graces, leftovers=leftovers)
        self._cpu = TreeTime()
        self._gpu = gpu or GpuTime()
        self._words: deque[str] = deque(maxlen=LAST_LINES)
        """The last lines of this life; the log goes on across lives."""
        self._command: tuple[str, ...] = ()
        self._has_answered = False

    @property
    def pid(self) -> int | None:
        """The engine's process id while it runs."""
        return self._process.pid

    @property
    def containment(self) -> str:
        """See Backend.containment."""
        return self._process.containment

    async def start(
        self, argv: Sequence[str], environment: Mapping[str, str], on_line: Callable[[str], None] | None = None
    ) -> None:
        """Starts the program, without the keys of the mesh; `on_line` gets every output line. Raises CONNECT_FAILED."""
        self._words.clear()
        self._command, self._has_answered = tuple(argv), False

        def read(line: str) -> None:
            self._words.append(line)
            if on_line is not None:
                on_line(line)

        given = {name: value for name, value in environment.items() if name not in KEY_VARIABLES}
        await self._process.start(argv, env=given, on_line=read)

    def noting(self, call: CallInfo) -> CallInfo:
        """The call, whose tokens are noted as answers of this process."""

        def on_token() -> None:
            self._has_answered = True
            call.on_token()

        return replace(call, on_token=on_token)

    def note_answer(self) -> None:
        """The process brought a result: its program runs on this processor."""
        self._has_answered = True

    async def stop(self) -> None:
        """See Backend.stop."""
        await self._process.stop()

    def signs(self) -> ProcessSigns | None:
        """See Backend.signs."""
        pid = self._process.pid
        if pid is None:
            return None
        members = self._process.member_pids()
        return ProcessSigns(cpu_seconds=self._cpu.seconds(pid, members), gpu_seconds=self._gpu.seconds(members))

    def processes(self) -> tuple[ProcessId, ...]:
        """See Backend.processes."""
        members = (process_id_of(pid) for pid in sorted(self._process.member_pids()))
        return tuple(process for process in members if process is not None)

    async def wait_exit(self) -> ExitReport:
        """See Backend.wait_exit."""
        how = await self._process.wait()
        if self._process.ended_by_us:
            await asyncio.Event().wait()  # stopped by us: the waiting task is cancelled
        return self._report(how)

    async def while_loading(
        self, awaited: Awaitable[_Result], stall_seconds: float, share: Callable[[], float | None] = _unknown
    ) -> _Result:
        """The result of `awaited`, unless the process dies (SERVER_DIED) or stalls (LOAD_STALLED) before it comes.

        `share` says how much is loaded; while it grows nothing is stalled.
        """
        ready = asyncio.ensure_future(awaited)
        died = asyncio.create_task(self._process.wait())
        watch, loaded = LoadStallDetector(self._load_signs()), share()
        try:
            while True:
                await asyncio.wait({ready, died}, timeout=LOAD_CHECK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if ready.done():
                    return ready.result()
                if died.done():
                    raise self._death(died.result(), LOADING)
                signs, before, loaded = self._load_signs(), loaded, share()
                watch = LoadStallDetector(signs) if loaded != before else watch.observe(signs)
                if watch.stalled(signs.at_seconds, stall_seconds):
                    raise WeftError(Reason.LOAD_STALLED, f"loading made no progress for {stall_seconds:.0f} s")
        finally:
            ready.cancel()
            died.cancel()

    async def explain_break(self, when: str = WORKING) -> WeftError | None:
        """Why a connection broke, if it is because the process ended."""
        try:
            async with asyncio.timeout(DEATH_NOTICE_SECONDS):
                how = await self._process.wait()
        except TimeoutError:
            return None
        if self._process.ended_by_us:
            return WeftError(Reason.WORKER_RESTARTED, "the backend was stopped while it worked on the request")
        return self._death(how, when)

    def _load_signs(self) -> LoadSample:
        pid = self._process.pid
        cpu_seconds = 0.0 if pid is None else self._cpu.seconds(pid, self._process.member_pids())
        return LoadSample(asyncio.get_running_loop().time(), self.log.total_bytes, cpu_seconds)

    def _report(self, how: str) -> ExitReport:
        killed_for_memory = self._process.oom_killed() is True
        why = explain_out_of_memory(how, list(self._words), killed_for_memory=killed_for_memory)
        if why is not None:
            return ExitReport(reason=Reason.OUT_OF_MEMORY, how=why)
        foreign = explain_foreign_build(how, self._command, has_answered=self._has_answered)
        return ExitReport(reason=Reason.SERVER_DIED, how=foreign or how)

    def _death(self, how: str, when: str) -> WeftError:
        report = self._report(how)
        lines = " | ".join([*self._words][-CRASH_LOG_LINES:]) if when == LOADING else ""
        return WeftError(report.reason, f"the backend died {when} ({report.how}){': ' + lines if lines else ''}")
