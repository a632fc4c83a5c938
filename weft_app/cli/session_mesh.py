"""A mesh for the length of one command: `weft up` as a child process, on a home where no mesh runs."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from runner_svc.supervise import parent_death
from weft.client._home import mesh_address
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft_app.cli.options import note
from weft_app.compose.home import WeftHome, has_started
from weft_app.config.config import CONFIG_NAME

START_SECONDS = 3_600.0
"""Longest start: with a weft.yaml all of its models are loaded first, and pulled."""
STOP_SECONDS = 60.0
"""Longest stop, after which the processes are killed: a drain and the end of all engines."""
POLL_SECONDS = 0.05
MAX_OUTPUT_BYTES = 65_536
OUTPUT_NAME = "session.out"
_STAGES = ("... ", "ok  ", "warn ", "fail ")
"""How the lines of the stages of a start begin, see `weft_app.cli.stages`."""


def is_mesh_running(home: WeftHome) -> bool:
    """Whether a mesh is found for a home: one that runs on it, or one elsewhere that the environment names.

    One that only begins is waited for. Raises SERVICE_UNAVAILABLE where that takes longer than START_SECONDS.
    """
    _await_start(home)
    try:
        mesh_address(home.root, "registry")
    except WeftError:
        return False
    # A host that was killed leaves its file, and not its lock.
    return home.running() is None or home.is_claimed()


def _await_start(home: WeftHome) -> None:
    """Waits until the models of the mesh whose host has locked a home are ready, or the host has ended."""
    deadline, is_told = time.monotonic() + START_SECONDS, False
    while not has_started(home.running()) and home.is_claimed():
        if time.monotonic() >= deadline:
            raise _too_slow(home, home.logs)
        if not is_told:
            is_told = True
            note(f"a mesh is starting on {home.root}; waiting until its models are ready")
        time.sleep(POLL_SECONDS)


@contextmanager
def session_mesh(home: WeftHome, config: Path | None) -> Iterator[dict[str, Any]]:
    """Starts a mesh on a home, yields what it announced, and stops it. It dies with this process, even when killed.

    Without a configuration it has no model, so that models are loaded by their sources alone. Raises
    SERVICE_UNAVAILABLE with the last line of its output where it does not start.
    """
    home.create()
    output = home.logs / OUTPUT_NAME
    process = _start(home, config, output)
    try:
        yield _announced(home, process, output)
    finally:
        _stop(process)


def _start(home: WeftHome, config: Path | None, output: Path) -> "subprocess.Popen[bytes]":
    arguments = ["up", "--home", str(home.root), "--no-demo"]
    if config is not None:
        arguments += ["--config", str(config)]
    elif not Path(CONFIG_NAME).is_file():
        # Nothing says where others expect it.
        arguments += ["--port", "0"]
    with output.open("wb") as file:
        return subprocess.Popen(  # noqa: S603 - an argument list, never a shell
            [
                *(sys.executable, "-I", "-S", str(Path(parent_death.__file__)), str(os.getpid())),
                *(sys.executable, "-m", "weft_app.cli.main", *arguments),
            ],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            # Ctrl-C is for this command, which ends the mesh.
            start_new_session=True,
        )


def _announced(home: WeftHome, process: "subprocess.Popen[bytes]", output: Path) -> dict[str, Any]:
    """Waits until the mesh is up, showing the stages of its start, and returns what it announced."""
    deadline, shown = time.monotonic() + START_SECONDS, 0
    while time.monotonic() < deadline:
        lines = _lines(output)
        for line in lines[shown:]:
            if line.startswith(_STAGES) and "services: " not in line:
                note(line)
        shown = len(lines)
        facts = home.running()
        if facts is not None and has_started(facts) and facts.get("pids", {}).get("host") == process.pid:
            return facts
        if process.poll() is not None:
            why = lines[-1].removeprefix("weft: ") if lines else f"exit status {process.returncode}"
            raise WeftError(Reason.SERVICE_UNAVAILABLE, f"no mesh could be started on {home.root}: {why}")
        time.sleep(POLL_SECONDS)
    raise _too_slow(home, output)


def _too_slow(home: WeftHome, output: Path) -> WeftError:
    message = f"the mesh on {home.root} did not start within {START_SECONDS:.0f} s; see {output}"
    return WeftError(Reason.SERVICE_UNAVAILABLE, message)


def _lines(output: Path) -> list[str]:
    with suppress(OSError), output.open("rb") as file:
        return file.read(MAX_OUTPUT_BYTES).decode("utf-8", "replace").splitlines()
    return []


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Drains and ends the mesh; a second Ctrl-C, or a drain that is too long, kills it."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except (KeyboardInterrupt, subprocess.TimeoutExpired):
        process.kill()
        process.wait()
