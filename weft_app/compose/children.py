"""Runner processes of `weft up`: start, supervision, restart, stop."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import structlog

from runner_svc.policy.restart import RestartHistory, RestartLimits
from runner_svc.supervise import parent_death
from weft.kernel.clock import Clock
from weft.kernel.service import start_critical, stop_tasks

log = structlog.get_logger("weft_app.compose")

RESTART_PAUSE_SECONDS = 1.0
REFUSAL_CODES = frozenset({2, 4})
"""Exit codes of a command that was called wrongly, or whose resources are taken; see docs/cli.md."""
REFUSALS_BELIEVED = 3
"""Refusals in a row before a start is given up: what an earlier process holds may come free."""
MAX_WORDS_BYTES = 1024
KILL_MARGIN_SECONDS = 15.0
"""Time beyond the drain that a runner needs to end its backends."""


class RunnerChild:
    """One `weft serve runner` process. It dies with this process, even when killed; its backends die with it."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        output: Path,
        clock: Clock,
        *,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`tell` is called with a sentence when the process ended by itself."""
        self.name = name
        self._tell = tell
        self._arguments = arguments
        self._output = output
        self._clock = clock
        self._deaths = RestartHistory()
        self._refusals = 0
        self._last_words = ""
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The process id while the process runs."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    @property
    def refusal(self) -> str:
        """Why it cannot start, in its own words; empty: it can."""
        return self._last_words if self._refusals >= REFUSALS_BELIEVED else ""

    async def start(self) -> None:
        """Start the process and keep it running."""
        self._process = await self._spawn()
        self._watch = start_critical(self._keep_running(), name=f"runner-{self.name}")

    async def stop(self, grace_seconds: float) -> None:
        """Asks it to drain, and kills it when it takes much longer than that. Idempotent."""
        watch, self._watch = self._watch, None
        if watch is not None:
            await stop_tasks([watch])
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), grace_seconds + KILL_MARGIN_SECONDS)
            return
        log.error("runner did not end, killing it", runner=self.name)
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    def kill(self) -> None:
        """Kills it permanently. Its backends die with it."""
        if self._watch is not None:
            self._watch.cancel()
        if self.pid is not None and self._process is not None:
            self._process.kill()

    async def _spawn(self) -> asyncio.subprocess.Process:
        # Its own logs go to a file of their own; this one holds what is printed past them, a crash above all.
        with self._output.open("wb") as output:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                *("-I", "-S", str(Path(parent_death.__file__)), str(os.getpid())),
                *(sys.executable, "-m", "weft_app.cli.main", *self._arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                # Ctrl-C on the terminal is for the host alone: it orders the drains.
                start_new_session=True,
            )

    async def _keep_running(self) -> None:
        while True:
            assert self._process is not None, "watched before it was started"
            code = await self._process.wait()
            self._refusals = self._refusals + 1 if code in REFUSAL_CODES else 0
            self._last_words = self._read_last_words() if code > 0 else f"see {self._output.with_suffix('.log')}"
            log.error("runner process ended", runner=self.name, code=code, why=self._last_words)
            self._tell(f"runner {self.name} ended ({_how_it_ended(code)}): {self._last_words}; it is started again")
            self._process = await self._spawn_again()

    async def _spawn_again(self) -> asyncio.subprocess.Process:
        while True:
            self._deaths, pause = self._deaths.after_death(self._clock.monotonic(), RestartLimits())
            pause = max(RESTART_PAUSE_SECONDS, pause)
            log.warning("runner process is started again", runner=self.name, pause_seconds=pause)
            await self._clock.sleep(pause)
            try:
                return await self._spawn()
            except OSError as error:  # a limit of processes or open files is reached: it may pass
                log.error("runner process cannot be started", runner=self.name, why=error.strerror)  # noqa: TRY400 - words enough

    def _read_last_words(self) -> str:
        with suppress(OSError), self._output.open("rb") as output:
            output.seek(max(0, self._output.stat().st_size - MAX_WORDS_BYTES))
            lines = output.read(MAX_WORDS_BYTES).decode("utf-8", "replace").strip().splitlines()
            if lines:
                return lines[-1].removeprefix("weft: ")
        return f"see {self._output}"


def _how_it_ended(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
