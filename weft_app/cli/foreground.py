"""A mesh in the foreground: start-up progress, serving, reloads, shutdown."""

import asyncio
import os
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.gateway_config import Exposure
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.machine.memory_tuning import large_imports
from weft.kernel.services.service_lifecycle import start_critical, stop_tasks
from weft.kernel.telemetry.structured_logs import configure_logging
from weft.kernel.time.clock import Clock, SystemClock
from weft_app.cli.discover import offered_models
from weft_app.cli.inherited import leave_deleted_folder
from weft_app.cli.network_options import Discover, NetworkOptions
from weft_app.cli.options import naming_fields
from weft_app.cli.ready_text import first_access, ready_text
from weft_app.cli.reload import reload_lines
from weft_app.cli.serving import run_service, serving
from weft_app.cli.stages import StageDisplay
from weft_app.cli.terminal import is_out_terminal, note, say
from weft_app.compose.configuration import ConfigurationSource, ReadConfiguration
from weft_app.compose.discovery import discovered_runners, keep_discovered
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

if TYPE_CHECKING:
    from weft_app.compose.up import UpHost


def serve_mesh(
    home: Path,
    config: Path | None,
    network: NetworkOptions,
    *,
    runner_http_port: int | None,
    discover: Discover | None,
    no_demo: bool,
    verbose: bool,
    watch: bool,
) -> None:
    """Starts a mesh and serves until a signal; see the options of `weft up`."""
    with serving():
        folder = WeftHome(home.expanduser().absolute())
        source, read = checked_source(folder, config, network)
        # Not claimed during the question, as others wait for a mesh that starts.
        with naming_fields(network.option_of):
            found = offered_models(read.config, folder, discover, no_demo=no_demo)
            if found is not None:
                keep_discovered(found, folder)
                source = replace(source, runners=partial(discovered_runners, folder))
            elif no_demo:
                source = replace(source, runners=tuple)
            source = replace(source, http_port=runner_http_port)
            watched = partial(watch_files, source.files, look_of(source.files())) if watch else None
            read = source.read()
        loaded = read.config
        leave_deleted_folder(folder.root)
        log_file = None if verbose else folder.log_file("host", loaded.log.max_file_bytes)
        configure_logging("host", level=loaded.log.level, file=log_file)
        with folder.claim(), naming_fields(network.option_of):
            with large_imports():
                from weft_app.compose.up import UpHost  # noqa: PLC0415 - after the checks

            served = UpHost(source, read, folder, notify=note, is_discovered=found is not None)
            starts_again = run_service(_run(served, loaded, folder, watched))
        if starts_again:
            start_again()


def checked_source(
    folder: WeftHome, config: Path | None, network: NetworkOptions
) -> tuple[ConfigurationSource, ReadConfiguration]:
    """Returns the configuration of a mesh, and checks that its home and its HTTP port are free.

    Raises INVALID_ARGUMENT naming the option or the field, ALREADY_EXISTS and RESOURCE_IN_USE.
    """
    from gateway.http.server import free_address  # noqa: PLC0415 - Windows, refused above, cannot import it

    source = ConfigurationSource(
        path=config,
        overrides=network.overrides(),
        below=partial(network.with_relay, below=partial(environment_of_mesh, environment=os.environ)),
    )
    with naming_fields(network.option_of):
        read = source.read()
    folder.create()
    with folder.claim(), naming_fields(network.option_of):
        # Its protection is checked when the gateway listens.
        edge = Exposure(host=read.config.host, port=read.config.port, has_keys=True, is_insecure=True)
        run_service(free_address(edge, "--port"))
    return source, read


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
            access = await first_access(host, home, is_terminal=is_out_terminal())
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
