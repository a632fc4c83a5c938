"""Programs run by installations and pulls, with their output line by line; they end with their caller."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from runner_svc.supervise.logs import LogRing
from runner_svc.supervise.process import SupervisedProcess, describe_exit

_FOREIGN_VARIABLES = ("PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
"""Variables that refer to a Python outside the environment."""


async def run_program(
    command: Sequence[str | Path],
    read: Callable[[str], object],
    *,
    variables: Mapping[str, str],
    folder: Path,
) -> str:
    """Runs a program in `folder` and returns how it failed; empty: it succeeded. `read` gets each line of its output.

    The program ends with this process; cancelling the call ends its children too. Raises CONNECT_FAILED.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _FOREIGN_VARIABLES}

    def read_lines(lines: Sequence[str]) -> None:
        for line in lines:
            read(line)

    process = SupervisedProcess(LogRing())
    try:
        await process.start(
            list(map(str, command)), env={**environment, **variables}, on_lines=read_lines, folder=folder
        )
        how = await process.wait()
    finally:
        await process.stop()
    return "" if how == describe_exit(0) else how
