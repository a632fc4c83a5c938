"""`weft up -d`: a mesh in the background, and the stages of its start on this terminal."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import typer

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft_app.cli.options import EXIT_FAILED, note
from weft_app.cli.output import say
from weft_app.compose.home import WeftHome

START_SECONDS = 3_600.0
"""Longest wait for the start: all models of a weft.yaml are loaded, and pulled, before it is up."""
STOP_SECONDS = 60.0
"""Longest wait for the end of a start that Ctrl-C has broken off."""
POLL_SECONDS = 0.05
MAX_READ_BYTES = 65_536
"""Bytes of the output that are read at a time."""
OUTPUT_NAME = "up.out"
STOP_LINE = "  stop with Ctrl-C"
"""Last line that `weft up` prints of its start."""
ShowLine = Callable[[str], str]
"""Returns a line of the output as this terminal shows it."""
_COLOURS = ("FORCE_COLOR", "TTY_COMPATIBLE")
"""Variables that ask for a live display, which a file has no use for."""


def arguments_of(context: typer.Context, *, without: frozenset[str]) -> list[str]:
    """Returns the options that were typed, as command-line arguments; those with a name in `without` are left out."""
    given: list[str] = []
    for option in context.command.params:
        name = option.name or ""
        source = context.get_parameter_source(name)
        if name in without or source is None or source.name != "COMMANDLINE":
            continue
        value = context.params[name]
        if isinstance(value, bool):
            given.append(option.opts[0] if value else option.secondary_opts[0])
            continue
        for each in value if isinstance(value, list | tuple) else (value,):
            given += [option.opts[0], str(getattr(each, "value", each))]
    return given


def up_in_background(home: WeftHome, arguments: Sequence[str], show_line: ShowLine = str) -> None:
    """Starts `weft up` with these arguments in its own session, and returns when it serves.

    Its output is shown until then, each line by `show_line`, and kept in a file. Ends the command with the exit code of
    a start that failed; Ctrl-C ends the start. Raises DEADLINE_EXCEEDED after START_SECONDS; the start goes on.
    """
    home.create()
    output = home.logs / OUTPUT_NAME
    process = _start(arguments, output)
    try:
        _await_start(process, output, show_line)
    except KeyboardInterrupt:
        _end(process)
        raise
    say(
        f"  it runs in the background (pid {process.pid})\n\n"
        f"    weft status   weft logs   weft stop\n\n"
        f"  its output is in {output}\n"
    )


def _start(arguments: Sequence[str], output: Path) -> "subprocess.Popen[bytes]":
    environment = {name: value for name, value in os.environ.items() if name not in _COLOURS}
    with output.open("wb") as file:
        return subprocess.Popen(  # noqa: S603 - an argument list, never a shell
            [sys.executable, "-m", "weft_app.cli.main", "up", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            # Neither Ctrl-C nor the end of this terminal reaches it.
            start_new_session=True,
        )


def _await_start(process: "subprocess.Popen[bytes]", output: Path, show_line: ShowLine) -> None:
    deadline = time.monotonic() + START_SECONDS
    for line in _lines(process, output, deadline):
        if line == STOP_LINE:
            return
        if line.startswith("weft: "):
            note(line.removeprefix("weft: "))
        else:
            say(f"{show_line(line)}\n")
    if process.poll() is None:
        raise WeftError(
            Reason.DEADLINE_EXCEEDED, f"the mesh still starts after {START_SECONDS:.0f} s; its output is in {output}"
        )
    raise typer.Exit(process.returncode or EXIT_FAILED)


def _lines(process: "subprocess.Popen[bytes]", output: Path, deadline: float) -> Iterator[str]:
    """Yields the lines of the output as they come, to the end of the process or the deadline."""
    rest = b""
    with output.open("rb") as file:
        while time.monotonic() < deadline:
            has_ended = process.poll() is not None
            *lines, rest = (rest + file.read(MAX_READ_BYTES)).split(b"\n")
            yield from (line.decode("utf-8", "replace") for line in lines)
            if not lines:
                if has_ended:
                    return
                time.sleep(POLL_SECONDS)


def _end(process: "subprocess.Popen[bytes]") -> None:
    note("ending the start")
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except (KeyboardInterrupt, subprocess.TimeoutExpired):
        process.kill()
        process.wait()
