"""`weft up` as a child process: in the background (`weft up -d`), or for the duration of a command (`weft run`)."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from runner_svc.supervise import parent_death
from weft.client._home import mesh_address
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.cli.discover import offered_models
from weft_app.cli.network_options import Discover, NetworkOptions
from weft_app.cli.options import EXIT_FAILED
from weft_app.cli.ready_text import KeptAccess
from weft_app.cli.serving import lasting_streams, serving
from weft_app.cli.stages import STARTING, STOP_LINE
from weft_app.cli.terminal import is_out_terminal, note, say
from weft_app.compose.home import WeftHome, has_started
from weft_app.config.config import CONFIG_NAME

START_SECONDS = 3_600.0
"""Timeout of the start, which includes pulling and loading all models of weft.yaml."""
STOP_SECONDS = 60.0
"""Timeout of the drain and the end of all engines; then the process is killed."""
POLL_SECONDS = 0.05
MAX_READ_BYTES = 65_536
BACKGROUND_NAME, SESSION_NAME = "up.out", "session.out"
_STAGES = ("... ", "ok  ", "warn ", "fail ")
"""Prefixes of the lines of a start's stages, see `weft_app.cli.stages`."""
_COLOURS = ("FORCE_COLOR", "TTY_COMPATIBLE")
"""Variables that request a live display, which is useless in a file."""
_UP = (sys.executable, "-m", "weft_app.cli.main", "up")


def arguments_of(context: typer.Context, *, without: frozenset[str]) -> list[str]:
    """Returns the options from the command line as arguments, except those in `without`."""
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


def detached(
    context: typer.Context,
    home: Path,
    config: Path | None,
    network: NetworkOptions,
    discover: Discover | None,
    *,
    no_demo: bool,
) -> None:
    """Starts a mesh in the background with the options of `weft up`."""
    folder = WeftHome(home.expanduser().absolute())
    from weft_app.cli.foreground import checked_source  # noqa: PLC0415 - other users of this module start no mesh

    with serving():
        # Checked before anything is looked for and started, and again by the child.
        _, read = checked_source(folder, config, network)
    with lasting_streams():
        # Asks here, since the child has no terminal.
        found = offered_models(read.config, folder, discover, no_demo=no_demo)
        arguments = arguments_of(context, without=frozenset({"detach", "discover"}))
        kept = KeptAccess(folder)
        arguments += ["--discover", Discover.NO if found is None else Discover.YES]
        up_in_background(folder, arguments, kept.on_terminal if is_out_terminal() else str)
        kept.remove_shown()


def up_in_background(home: WeftHome, arguments: Sequence[str], show_line: Callable[[str], str] = str) -> None:
    """Starts `weft up` with these arguments in a separate session, and returns when it serves.

    Its output is stored in a file and shown until then, each line by `show_line`. A failed start ends the command with
    its exit code; Ctrl-C ends the start. Raises DEADLINE_EXCEEDED after START_SECONDS, but the start continues.
    """
    home.create()
    output = home.logs / BACKGROUND_NAME
    environment = {name: value for name, value in os.environ.items() if name not in _COLOURS}
    process = _start([*_UP, *arguments], output, environment)

    def show(line: str) -> None:
        if line.startswith("weft: "):
            note(line.removeprefix("weft: "))
        else:
            say(f"{show_line(line)}\n")

    try:
        serves = _serves(process, output, show)
    except KeyboardInterrupt:
        note("ending the start")
        _end(process)
        raise
    if serves is None:
        message = f"the mesh has not started after {START_SECONDS:.0f} s; its output is in {output}"
        raise WeftError(Reason.DEADLINE_EXCEEDED, message)
    if not serves:
        raise typer.Exit(process.returncode or EXIT_FAILED)
    say(
        f"  it runs in the background (pid {process.pid})\n\n"
        f"    weft status   weft logs   weft stop\n\n"
        f"  its output is in {output}\n"
    )


def _start(arguments: Sequence[str], output: Path, environment: dict[str, str] | None) -> "subprocess.Popen[bytes]":
    """Starts a process that continues after Ctrl-C and after the end of this terminal."""
    with output.open("wb") as file:
        return subprocess.Popen(  # noqa: S603 - an argument list, never a shell
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def _serves(process: "subprocess.Popen[bytes]", output: Path, show: Callable[[str], None]) -> bool | None:
    """Passes the lines of a start to `show`. Returns whether the mesh serves; None: not after START_SECONDS."""
    for line in written_lines(process, output, time.monotonic() + START_SECONDS):
        if line == STOP_LINE:
            return True
        show(line)
    return None if process.poll() is None else False


def written_lines(process: "subprocess.Popen[bytes]", output: Path, deadline: float) -> Iterator[str]:
    """Yields the lines of a process's output until it ends or the deadline is reached."""
    rest = b""
    with output.open("rb") as file:
        while time.monotonic() < deadline:
            has_ended = process.poll() is not None
            while chunk := file.read(MAX_READ_BYTES):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from (line.decode("utf-8", "replace") for line in lines)
            if has_ended:
                yield from [rest.decode("utf-8", "replace")] if rest else []
                return
            time.sleep(POLL_SECONDS)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Drains and ends a mesh. A second Ctrl-C or a timeout kills it."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except (KeyboardInterrupt, subprocess.TimeoutExpired):
        process.kill()
        process.wait()


def is_mesh_running(home: WeftHome) -> bool:
    """Whether a mesh runs on a home, or the environment refers to one elsewhere.

    Waits for a starting mesh until its models are ready. Raises SERVICE_UNAVAILABLE after START_SECONDS.
    """
    deadline, was_announced = time.monotonic() + START_SECONDS, False
    while not has_started(home.running()) and home.is_claimed():
        if time.monotonic() >= deadline:
            raise _too_slow(home, home.logs)
        if not was_announced:
            was_announced = True
            note(f"a mesh is starting on {home.root}; waiting until its models are ready")
        time.sleep(POLL_SECONDS)
    try:
        mesh_address(home.root, "registry")
    except WeftError:
        return False
    # A killed host leaves its file but not its lock.
    return home.running() is None or home.is_claimed()


@contextmanager
def session_mesh(home: WeftHome, config: Path | None) -> Iterator[dict[str, Any]]:
    """Starts a mesh on a home, yields its description, and stops it. It dies with this process, even if killed.

    Without a configuration it has no models, which are then loaded by source. Raises SERVICE_UNAVAILABLE with the last
    line of output if it does not start.
    """
    home.create()
    output = home.logs / SESSION_NAME
    guard = (sys.executable, "-I", "-S", str(Path(parent_death.__file__)), str(os.getpid()))
    arguments = [*guard, *_UP, "--home", str(home.root), "--no-demo"]
    if config is not None:
        arguments += ["--config", str(config)]
    elif not Path(CONFIG_NAME).is_file():
        # Without a configuration others expect no specific port.
        arguments += ["--port", "0"]
    process = _start(arguments, output, None)
    try:
        yield _announced(home, process, output)
    finally:
        _end(process)


def _announced(home: WeftHome, process: "subprocess.Popen[bytes]", output: Path) -> dict[str, Any]:
    """Waits until the mesh is up and returns its description. Shows the stages of the start."""
    why = ""

    def show(line: str) -> None:
        nonlocal why
        why = "" if line.startswith(STARTING) else line.removeprefix("weft: ")
        if line.startswith(_STAGES) and "services: " not in line:
            note(line)

    serves = _serves(process, output, show)
    if serves is None:
        raise _too_slow(home, output)
    if not serves:
        why = why or f"exit status {process.returncode}"
        raise WeftError(Reason.SERVICE_UNAVAILABLE, f"no mesh could be started on {home.root}: {why}")
    return home.running() or {}


def _too_slow(home: WeftHome, output: Path) -> WeftError:
    message = f"the mesh on {home.root} did not start within {START_SECONDS:.0f} s; see {output}"
    return WeftError(Reason.SERVICE_UNAVAILABLE, message)
