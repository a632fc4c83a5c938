"""`weft stop` and `weft mesh restart`: the end of a mesh on this machine, and its start as it was started before."""

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

import psutil
import typer

from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.names import require_name_of_model
from weft_app.cli.completion import complete_restarted
from weft_app.cli.options import DEFAULT_HOME, HomeOption
from weft_app.cli.terminal import note, say
from weft_app.cli.wait import parse_duration
from weft_app.compose.home import WeftHome, has_started

POLL_SECONDS = 0.1
AGAIN_SECONDS = 0.5
"""Interval of further signals with --now: a host takes signals in quick succession for one, and hurries at a later
one."""


def stop(
    home: HomeOption = DEFAULT_HOME,
    timeout: Annotated[
        str, typer.Option(help="How long to wait for the mesh to stop, such as 90s or 5m.", metavar="TIME")
    ] = "2m",
    *,
    now: Annotated[bool, typer.Option("--now", help="Cancel running requests.")] = False,
) -> None:
    """Stop the mesh of a home after its running requests, as Ctrl-C does.

    Exit code 5 if it has not ended in time; it continues to stop. If weft is not running, nothing is done.

    Example: weft stop --timeout 5m
    """
    seconds = parse_duration(timeout)
    folder = WeftHome(home.expanduser().absolute())
    if not folder.is_claimed():
        note(f"weft is not running (home {folder.root})")
        return
    process = folder.owner()
    if process is None:
        raise WeftError(Reason.RESOURCE_IN_USE, f"the mesh on {folder.root} is starting or stopping; try again")
    send(process, signal.SIGTERM, folder)
    deadline = time.monotonic() + seconds
    again = time.monotonic() + AGAIN_SECONDS
    while folder.is_claimed():
        if now and time.monotonic() >= again:
            again += AGAIN_SECONDS
            send(process, signal.SIGTERM, folder)
        if time.monotonic() >= deadline:
            raise WeftError(
                Reason.DEADLINE_EXCEEDED,
                f"the mesh on {folder.root} (pid {process}) is still finishing requests after {timeout}; cancel them "
                "with weft stop --now",
            )
        time.sleep(POLL_SECONDS)
    say(f"stopped the mesh on {folder.root}\n")


def send(process: int, number: signal.Signals, home: WeftHome) -> None:
    """Sends a signal to the process that runs a mesh, by its id in the home. Raises PERMISSION_DENIED."""
    if not home.is_claimed_by(process):
        if not home.is_claimed():
            return
        message = f"process {process} in {home.lock_file} does not run the mesh; stop it as its user, in its container"
        raise WeftError(Reason.PERMISSION_DENIED, message)
    try:
        with suppress(ProcessLookupError):
            os.kill(process, number)
    except PermissionError as error:
        message = f"the mesh on {home.root} (pid {process}) was started by another user"
        raise WeftError(Reason.PERMISSION_DENIED, message) from error


def restart(
    model: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[model NAME]",
            help="Reload a model instead of the mesh: model NAME or model/NAME.",
            show_default=False,
            autocompletion=complete_restarted,
        ),
    ] = None,
    *,
    home: HomeOption = DEFAULT_HOME,
    timeout: Annotated[
        str, typer.Option(help="How long to wait until it is ready again, such as 90s.", metavar="TIME")
    ] = "10m",
) -> None:
    """Restart the mesh of a home, or reload a model, after running requests.

    It keeps its command line, environment, terminal and process id. Exit code 5 if it does not serve in time.

    A model is unloaded when its running requests have ended, and loaded again with the options of its last load;
    requests that arrive meanwhile wait in the queue. It then stays loaded, as after weft load, unless that load had a
    --keep-alive.

    Example: weft mesh restart --timeout 5m, or weft mesh restart model qwen
    """
    if model:
        from weft_app.cli.operations import restart_model  # noqa: PLC0415 - it brings rich with it

        restart_model(_model_in(model), home)
        return
    seconds = parse_duration(timeout)
    folder = WeftHome(home.expanduser().absolute())
    process, running = folder.owner(), folder.running()
    if process is None or running is None:
        raise WeftError(Reason.SERVICE_UNAVAILABLE, f"no mesh serves on {folder.root}; start one with weft up")
    before = running.get("startTime"), folder.up_file.stat().st_mtime_ns
    send(process, signal.SIGUSR2, folder)
    note(f"the mesh on {folder.root} finishes its requests and restarts")
    url = _await_start(folder, process, before, seconds, timeout)
    say(f"the mesh on {folder.root} serves again at {url}\n")


def _model_in(words: Sequence[str]) -> str:
    """Parses `model NAME` or `model/NAME`. Raises INVALID_ARGUMENT."""
    kind, slash, name = words[0].partition("/")
    names = [name, *words[1:]] if slash else list(words[1:])
    if kind.lower() not in ("model", "models") or len(names) != 1:
        name = words[-1][:64]
        raise invalid_field(
            "MODEL", f"weft mesh restart restarts a mesh; to reload one model: weft mesh restart model {name}"
        )
    return require_name_of_model(names[0], "NAME")


def _await_start(home: WeftHome, process: int, before: tuple[object, int], seconds: float, timeout: str) -> str:
    """Waits until the mesh has restarted and its models are ready; returns its URL."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(OSError):
            running, announced = home.running(), home.up_file.stat().st_mtime_ns
            is_another = running is not None and running.get("startTime") != before[0] and announced != before[1]
            if running is not None and is_another and has_started(running):
                return str(running.get("url", ""))
        if not psutil.pid_exists(process):
            raise WeftError(
                Reason.SERVICE_UNAVAILABLE,
                f"the mesh on {home.root} has stopped and does not start; see its output, or run weft up",
            )
        time.sleep(POLL_SECONDS)
    raise WeftError(Reason.DEADLINE_EXCEEDED, f"the mesh on {home.root} is not ready again after {timeout}")
