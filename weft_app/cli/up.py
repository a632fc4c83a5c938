"""`weft up`: a whole mesh on this machine, until Ctrl-C; start-up progress, serving, shutdown.

The services are imported when it runs, see `weft_app.cli.serve`.
"""

import asyncio
import os
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
import uvloop

from weft.kernel.gc_tuning import large_imports
from weft.kernel.service import stop_tasks
from weft.kernel.telemetry import configure_logging
from weft_app.cli.options import DEFAULT_HOME, ConfigOption, HomeOption, note
from weft_app.cli.output import say
from weft_app.cli.serving import serving
from weft_app.cli.stages import StageDisplay
from weft_app.compose.demo import load_without_demo, with_http_port
from weft_app.compose.environment import environment_of_mesh
from weft_app.compose.home import WeftHome
from weft_app.compose.shutdown import CriticalTasks, ignore_hangups, stop_requested, until
from weft_app.config.config import WeftConfig
from weft_app.config.loader import load_config

if TYPE_CHECKING:
    from weft_app.compose.up import UpHost


def up(
    home: HomeOption = DEFAULT_HOME,
    config: ConfigOption = None,
    port: Annotated[
        int | None, typer.Option("--port", "-p", help="HTTP port; 0 takes a free one. Default 8080.")
    ] = None,
    grpc_port: Annotated[int | None, typer.Option(help="Also offer gRPC on this loopback port.")] = None,
    http_port: Annotated[
        int | None,
        typer.Option("--http-port", min=0, max=65_535, help="Also serve the HTTP API of the only runner here."),
    ] = None,
    no_demo: Annotated[
        bool,
        typer.Option(
            "--no-demo", help="Without a configuration serve no demo model, but those that `weft run` has added."
        ),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Logs on the terminal, not in a file.")] = False,
) -> None:
    """Start a mesh on this machine and serve until Ctrl-C.

    Without a configuration it serves the demo model, SmolLM2-135M.

    Example: weft up --home /tmp/mesh --port 9000
    """
    with serving():
        overrides: dict[str, Any] = {"port": port, "grpc_port": grpc_port}
        given = {name: value for name, value in overrides.items() if value is not None}
        load = load_without_demo if no_demo else load_config
        loaded = load(config, given, partial(environment_of_mesh, environment=os.environ))
        if http_port is not None:
            loaded = with_http_port(loaded, http_port)
        folder = WeftHome(home.expanduser().absolute())
        folder.create()
        log_file = None if verbose else folder.log_file("host", loaded.log.max_file_bytes)
        configure_logging("host", level=loaded.log.level, file=log_file)
        with large_imports():
            from weft_app.compose.up import UpHost  # noqa: PLC0415 - see the module docstring

        with folder.claim():
            uvloop.run(_run(UpHost(loaded, folder, config, notify=note), loaded, folder))


async def _run(host: "UpHost", config: WeftConfig, home: WeftHome) -> None:
    """Starts with progress, serves until a signal, shuts down."""
    stop = stop_requested()
    with CriticalTasks(stop):
        with StageDisplay(total=host.stage_count) as display:
            ready = await until(stop, host.start(display.show))
        if ready:
            print_ready(host, home)
            await stop.wait()
        say(f"\nstopping: finishing running requests (at most {config.drain_seconds:.0f} s)\n")
        await _stop(host, stop)
        say("stopped\n")


async def _stop(host: "UpHost", again: asyncio.Event) -> None:
    """Drains and stops everything; a second SIGINT or SIGTERM ends the draining."""
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


def print_ready(host: "UpHost", home: WeftHome) -> None:
    """Prints the addresses and commands with which a user starts."""
    model = host.models[0] if host.models else "<model>"
    keys = "  keys      callers need one: weft keys create\n" if host.asks_for_keys else ""
    shown = ' -H "Authorization: Bearer $WEFT_API_KEY"' if host.asks_for_keys else ""
    notice = f"\n  WARNING   {host.notice}\n" if host.notice else ""
    joins = f"  runners   join at {host.relay.url}; make a token: weft runner token create\n" if host.relay else ""
    say(
        f"\n  weft is up\n\n"
        f"  base URL  {host.url}/v1\n"
        f"  gRPC      {host.grpc_address}\n"
        f"{keys}{joins}"
        f"  logs      {home.logs}\n{notice}\n"
        f"  try it:\n\n"
        f"    curl {host.url}/v1/chat/completions -H 'Content-Type: application/json'{shown} \\\n"
        f'      -d \'{{"model": "{model}", "messages": [{{"role": "user", "content": "Say hello"}}]}}\'\n\n'
        f"  stop with Ctrl-C\n"
    )
