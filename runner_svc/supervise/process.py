"""One supervised child process and everything it starts."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from runner_svc.supervise.logs import LogRing
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

READ_BYTES = 64 * 1024
_SIGNAL_NAMES = MappingProxyType({number.value: number.name for number in signal.Signals})
"""Real-time signals have none."""
_TRAMPOLINE = str(Path(__file__).with_name("parent_death.py"))


@dataclass(frozen=True, slots=True, kw_only=True)
class StopGraces:
    """How long each step of ending a process may take."""

    first_term_seconds: float = 3.0
    """llama-server hangs on its first SIGTERM when a request is in flight (3 of 4 runs, measured) ..."""
    second_term_seconds: float = 2.0
    """... and ends at once on the second."""
    kill_seconds: float = 5.0
    """After SIGKILL the kernel only needs time to clean up."""


class SupervisedProcess:
    """A child in a session and group of its own, its output drained into a LogRing for as long as it lives.

    It gets SIGKILL when this process dies (Linux). `stop` ends the whole group; a grandchild that holds the output
    pipe cannot delay it.
    """

    def __init__(self, log: LogRing, graces: StopGraces | None = None) -> None:
        self._log = log
        self._graces = graces or StopGraces()
        self._process: asyncio.subprocess.Process | None = None
        self._drain: asyncio.Task[None] | None = None
        self.ended_by_us = False
        """Whether the process was told to end, as opposed to dying."""

    @property
    def pid(self) -> int | None:
        """The process id while the process runs, else None."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        """Start `argv` with exactly the environment `env`. Raises CONNECT_FAILED when it cannot be run at all.

        `on_line` hears every complete line of output (stdout and stderr are one stream).
        """
        guarded = [sys.executable, "-I", "-S", _TRAMPOLINE, str(os.getpid()), *argv]
        try:
            self._process = await asyncio.create_subprocess_exec(
                *guarded,
                env=dict(env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise WeftError(Reason.CONNECT_FAILED, f"cannot start {argv[0]}: {error.strerror}") from error
        self.ended_by_us = False
        self._drain = asyncio.create_task(self._drain_output(self._process, on_line), name="drain-output")

    async def wait(self) -> str:
        """Return when the process has ended, with how: "exit code 1", "signal SIGKILL"."""
        assert self._process is not None, "wait before start"
        return describe_exit(await self._process.wait())

    async def stop(self) -> None:
        """End the process and its group: TERM, TERM again, KILL, each within its grace. Idempotent."""
        process = self._process
        if process is None or self._drain is None:
            return
        self.ended_by_us = process.returncode is None
        try:
            graces = self._graces
            for signal_number, grace in (
                (signal.SIGTERM, graces.first_term_seconds),
                (signal.SIGTERM, graces.second_term_seconds),
                (signal.SIGKILL, graces.kill_seconds),
            ):
                if process.returncode is not None:
                    break
                _signal_group(process.pid, signal_number)
                with suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), grace)
        finally:
            # What the process left behind in its group goes too, also when this very stop is cancelled.
            _signal_group(process.pid, signal.SIGKILL)
            await self._stop_draining(process)

    async def _stop_draining(self, process: asyncio.subprocess.Process) -> None:
        drain, self._drain = self._drain, None
        if drain is not None:
            drain.cancel()
            with suppress(asyncio.CancelledError):
                await drain
        # Closing our end, not waiting for EOF: a grandchild may hold the other end for ever.
        transport = getattr(process, "_transport", None)
        if transport is not None:
            transport.close()

    async def _drain_output(self, process: asyncio.subprocess.Process, on_line: Callable[[str], None] | None) -> None:
        assert process.stdout is not None, "the output is a pipe"
        while chunk := await process.stdout.read(READ_BYTES):
            for line in self._log.feed(chunk):
                if on_line is not None:
                    on_line(line)


def describe_exit(return_code: int) -> str:
    """How a process ended, in words."""
    if return_code >= 0:
        return f"exit code {return_code}"
    return f"signal {_SIGNAL_NAMES.get(-return_code, -return_code)}"


def _signal_group(leader: int, signal_number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal_number)
