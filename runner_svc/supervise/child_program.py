"""Programs run by installations and pulls, with their output line by line; they end with their caller."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from runner_svc.supervise.logs import LogRing
from runner_svc.supervise.process import SupervisedProcess, describe_exit
from weft.kernel.access.principal import KEY_VARIABLES

MAX_LINE_BYTES = 65_536
"""Maximum length of an output line, which may be a JSON message; the rest is cut."""
LAST_OUTPUT_SECONDS = 5.0
"""Wait for the last output of an ended program."""
_DROPPED_VARIABLES = KEY_VARIABLES | {"PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"}
"""The mesh's keys, and variables that refer to a Python outside the environment."""


async def run_program(
    command: Sequence[str | Path],
    read: Callable[[str], object],
    *,
    variables: Mapping[str, str],
    folder: Path,
) -> str:
    """Runs a program in `folder` and returns how it failed; empty: it succeeded. `read` gets each line of its output.

    It does not see the mesh's keys, and ends with this process; cancelling the call ends its children too. Raises
    CONNECT_FAILED, and what `read` raises, which ends the program.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _DROPPED_VARIABLES}
    fault: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    def read_lines(lines: Sequence[str]) -> None:
        try:
            for line in lines if not fault.done() else ():
                read(line)
        except Exception as error:  # noqa: BLE001 - raised by the caller below
            fault.set_result(error)

    process = SupervisedProcess(LogRing(max_line_bytes=MAX_LINE_BYTES))
    ended: asyncio.Future[str] | None = None
    try:
        await process.start(
            list(map(str, command)), env={**environment, **variables}, on_lines=read_lines, folder=folder
        )
        ended = asyncio.ensure_future(process.wait(LAST_OUTPUT_SECONDS))
        await asyncio.wait((ended, fault), return_when=asyncio.FIRST_COMPLETED)
        if fault.done():
            raise fault.result()
        how = ended.result()
    finally:
        if ended is not None:
            ended.cancel()
        await process.stop()
    return "" if how == describe_exit(0) else how
