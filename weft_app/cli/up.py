"""`weft up`: a whole mesh on this machine, until Ctrl-C; start-up progress, serving, shutdown.

The services are imported when it runs, see `weft_app.cli.serve`.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.kernel.address import MAX_PORT
from weft.kernel.clock import Clock, SystemClock
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.memory_tuning import large_imports
from weft.kernel.service import start_critical, stop_tasks
from weft.kernel.telemetry import configure_logging
from weft_app.cli.background import arguments_of, up_in_background
from weft_app.cli.discover import Discover, offered
from weft_app.cli.inherited import leave_deleted_folder
from weft_app.cli.network_options import NetworkOptions, with_network_options
from weft_app.cli.options import DEFAULT_HOME, ConfigOption, HomeOption, naming_fields, note
from weft_app.cli.output import say
from weft_app.cli.ready_text import KeptAccess, first_access, ready_text
from weft_app.cli.reload import reload_lines
from weft_app.cli.serving import lasting_streams, run_service, serving
from weft_app.cli.stages import StageDisplay
from weft_app.compose.configuration import ConfigurationSource
from weft_app.compose.discovery import Discovered, discovered_runners, keep_discovered
from weft_app.compose.environment import environment_of_mesh
from weft_app.compose.file_watch import look_of, watch_files
from weft_app.compose.home import WeftHome
from weft_app.compose.shutdown import (
    CriticalTasks,
    ignore_hangups,
    reload_requested,
    restart_requested,
    start_again,
    stop_requested,
    until,
)
from weft_app.config.config import WeftConfig
from weft_app.config.loader import load_config

if TYPE_CHECKING:
    from weft_app.compose.up import UpHost


@with_network_options
def up(
    context: typer.Context,
    home: HomeOption = DEFAULT_HOME,
    config: ConfigOption = None,
    *,
    network: NetworkOptions,
    runner_http_port: Annotated[
        int | None, typer.Option(min=0, max=MAX_PORT, help="Port of the HTTP API of the only runner, see docs/api.md.")
    ] = None,
    http_port: Annotated[int | None, typer.Option(min=0, max=MAX_PORT, hidden=True)] = None,
    no_demo: Annotated[
        bool,
        typer.Option(
            "--no-demo", help="Without a configuration serve no demo model, but those that `weft run` has added."
        ),
    ] = False,
    discover: Annotated[
        Discover | None,
        typer.Option(
            help="Without runners in weft.yaml: serve the engines and model files that are found on this machine. "
            "Default: ask on a terminal.",
            show_default=False,
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Logs on the terminal, not in a file.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Reload weft.yaml when it changes, as weft reload does.")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Serve in the background: return when it serves. weft stop ends it.")
    ] = False,
) -> None:
    """Start a mesh on this machine and serve until Ctrl-C, or in the background.

    Without a configuration it looks for engines and models on this machine, and serves them, or the demo model,
    SmolLM2-135M.

    Example: weft up -d --home /tmp/mesh --port 9000, or for other machines as well: weft up --host 0.0.0.0
    """
    if detach:
        if verbose:
            raise invalid_field("--verbose", "goes without --detach; weft logs -f shows the logs")
        folder = WeftHome(home.expanduser().absolute())
        with lasting_streams():
            _detached(context, folder, load_config(config), discover, no_demo=no_demo)
        return
    with serving():
        folder = WeftHome(home.expanduser().absolute())
        source = ConfigurationSource(
            path=config,
            overrides=network.overrides(),
            below=partial(network.with_relay, below=partial(environment_of_mesh, environment=os.environ)),
        )
        with naming_fields(network.option_of):
            read = source.read()
            found = _offered(read.config, folder, discover, no_demo=no_demo)
            if found is not None:
                keep_discovered(found, folder)
                source = replace(source, runners=partial(discovered_runners, folder))
            elif no_demo:
                source = replace(source, runners=tuple)
            source = replace(source, http_port=_runner_port(runner_http_port, http_port))
            watched = partial(watch_files, source.files, look_of(source.files())) if watch else None
            read = source.read()
        loaded = read.config
        folder.create()
        leave_deleted_folder(folder.root)
        log_file = None if verbose else folder.log_file("host", loaded.log.max_file_bytes)
        configure_logging("host", level=loaded.log.level, file=log_file)
        with large_imports():
            from weft_app.compose.up import UpHost  # noqa: PLC0415 - see the module docstring

        with folder.claim(), naming_fields(network.option_of):
            served = UpHost(source, read, folder, notify=note, is_discovered=found is not None)
            starts_again = run_service(_run(served, loaded, folder, watched))
        if starts_again:
            start_again()


def _detached(
    context: typer.Context, home: WeftHome, read_here: WeftConfig, discover: Discover | None, *, no_demo: bool
) -> None:
    """Starts a mesh in the background with the options of this command."""
    arguments = arguments_of(context, without=frozenset({"detach", "discover"}))
    # Asks here, since the child has no terminal.
    found = _offered(read_here, home, discover, no_demo=no_demo)
    kept = KeptAccess(home)
    arguments += ["--discover", Discover.NO if found is None else Discover.YES]
    up_in_background(home, arguments, kept.on_terminal if sys.stdout.isatty() else str)
    kept.remove_shown()


def _offered(config: WeftConfig, home: WeftHome, wanted: Discover | None, *, no_demo: bool) -> Discovered | None:
    """Returns the discovered engines and models to serve; None: nothing, or the configuration has runners."""
    if config.runners is not None:
        return None
    return offered(wanted, config, home, "no model" if no_demo else "the demo model")


def _runner_port(port: int | None, old: int | None) -> int | None:
    """Returns the port of the runner's API, under either name of its option."""
    if old is not None:
        note("--http-port is the runner's own API, now called --runner-http-port; the mesh's HTTP port is --port")
    return old if port is None else port


async def _run(
    host: "UpHost",
    config: WeftConfig,
    home: WeftHome,
    watch: Callable[[asyncio.Event, Clock], Coroutine[Any, Any, None]] | None,
) -> bool:
    """Starts with progress, serves until a signal, and shuts down. Reloads on SIGHUP and on changes seen by `watch`.

    Returns whether to restart.
    """
    stop = stop_requested()
    reload, again = reload_requested(stop), restart_requested(stop)
    with CriticalTasks(stop):
        with StageDisplay(total=host.stage_count) as display:
            ready = await until(stop, host.start(display.show))
        if ready:
            access = await first_access(host, home, is_terminal=sys.stdout.isatty())
            say(ready_text(host, home, access))
            followers = [start_critical(_reload_when(reload, host), name="reloads")]
            if watch is not None:
                followers.append(start_critical(watch(reload, SystemClock()), name="watched-files"))
            await stop.wait()
            await stop_tasks(followers)
        say(f"\nstopping: finishing running requests (at most {config.drain_seconds:.0f} s)\n")
        await _stop(host, stop)
        say("stopped\n")
    return again.is_set()


async def _reload_when(requested: asyncio.Event, host: "UpHost") -> None:
    """Reloads on request, and prints what changed, or why nothing did."""
    while True:
        await requested.wait()
        requested.clear()
        try:
            answer = await host.configuration.reload(dry_run=False)
        except WeftError as error:
            note(f"the configuration is not reloaded: {error.message}")
        except Exception:  # noqa: BLE001 - the traceback is logged, and the mesh continues
            note("the configuration is not reloaded: an internal error, see the log")
        else:
            say("\n".join((*reload_lines(answer), "")))


async def _stop(host: "UpHost", again: asyncio.Event) -> None:
    """Drains and stops everything; a second SIGINT or SIGTERM ends the drain."""
    ignore_hangups()
    again.clear()
    stopping, hurrying = asyncio.create_task(host.stop()), asyncio.create_task(again.wait())
    await asyncio.wait({stopping, hurrying}, return_when=asyncio.FIRST_COMPLETED)
    hurrying.cancel()
    if stopping.done():
        stopping.result()
        return
    say("stopping now\n")
    host.kill_runners()
    await stop_tasks([stopping])
