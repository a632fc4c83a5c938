"""Programs that an installation runs: their output line by line, and their end with the installation."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from runner_svc.supervise import parent_death

TERM_SECONDS = 5.0
"""Time between SIGTERM and SIGKILL."""
MAX_LINE_BYTES = 65_536
_FOREIGN_VARIABLES = ("PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
"""Variables that are about another Python than that of the environment."""


async def run_program(
    command: Sequence[str | Path],
    read: Callable[[str], object],
    *,
    variables: Mapping[str, str],
    folder: Path,
) -> int:
    """Runs a program in `folder` and returns its exit status; `read` gets each line of its output.

    It ends with this process, and with its children when the call is cancelled.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _FOREIGN_VARIABLES}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", str(Path(parent_death.__file__)), str(os.getpid())),
        *map(str, command),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=PIPE,
        stderr=STDOUT,
        cwd=folder,
        env={**environment, **variables},
        limit=MAX_LINE_BYTES,
        # Ctrl-C on the terminal is for this process, which ends the program.
        start_new_session=True,
    )
    try:
        await _read_lines(process, read)
        return await process.wait()
    finally:
        await _end(process)


async def _read_lines(process: Process, read: Callable[[str], object]) -> None:
    assert process.stdout is not None
    while True:
        try:
            line = await process.stdout.readline()
        except ValueError:  # a line over the limit, which is dropped
            continue
        if not line:
            return
        read(line.decode("utf-8", "replace"))


async def _end(process: Process) -> None:
    """Ends the process group of a program that runs: SIGTERM, then SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), TERM_SECONDS)
