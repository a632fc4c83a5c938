"""`weft stop`: the end of a mesh that runs on this machine."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft_app.cli.options import DEFAULT_HOME, HomeOption, note
from weft_app.cli.output import say
from weft_app.cli.wait import parse_duration
from weft_app.compose.home import WeftHome

POLL_SECONDS = 0.1


def stop(
    home: HomeOption = DEFAULT_HOME,
    timeout: Annotated[
        str, typer.Option("--timeout", help="How long to wait for its end, such as 90s or 5m.", metavar="TIME")
    ] = "2m",
    *,
    now: Annotated[bool, typer.Option("--now", help="End running requests, too.")] = False,
) -> None:
    """Stop the mesh of a home: running requests are finished first, as with Ctrl-C.

    Exit code 5 where it has not ended in time; it goes on stopping. Nothing is done where weft is not running.

    Example: weft stop --timeout 5m
    """
    seconds = parse_duration(timeout)
    folder = WeftHome(home.expanduser().absolute())
    if not folder.is_claimed():
        note(f"weft is not running (home {folder.root})")
        return
    process = folder.owner()
    if process is None:
        raise WeftError(Reason.RESOURCE_IN_USE, f"the mesh on {folder.root} only begins, or just ends; try again")
    _signal(process, folder.root)
    if now:
        _signal(process, folder.root)
    deadline = time.monotonic() + seconds
    while folder.is_claimed():
        if time.monotonic() >= deadline:
            raise WeftError(
                Reason.DEADLINE_EXCEEDED,
                f"the mesh on {folder.root} (pid {process}) still finishes requests after {timeout}; "
                "end them with weft stop --now",
            )
        time.sleep(POLL_SECONDS)
    say(f"stopped the mesh on {folder.root}\n")


def _signal(process: int, root: Path) -> None:
    try:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)
    except PermissionError as error:
        raise WeftError(
            Reason.PERMISSION_DENIED, f"the mesh on {root} (pid {process}) was started by another user"
        ) from error
