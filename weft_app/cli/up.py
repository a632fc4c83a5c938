"""`weft up`: its options.

The modules that start a mesh are imported when it runs, after its first line: they import the services.
"""

import sys
from contextlib import suppress
from typing import Annotated

import typer

from weft import __version__
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.values.address import MAX_PORT
from weft_app.cli.network_options import Discover, NetworkOptions, with_network_options
from weft_app.cli.options import DEFAULT_HOME, WINDOWS, ConfigOption, HomeOption
from weft_app.cli.stages import STARTING
from weft_app.cli.terminal import note, say


@with_network_options
def up(
    context: typer.Context,
    home: HomeOption = DEFAULT_HOME,
    config: ConfigOption = None,
    *,
    network: NetworkOptions,
    runner_http_port: Annotated[
        int | None, typer.Option(min=0, max=MAX_PORT, help="Port of the only runner's own HTTP API; see docs/api.md.")
    ] = None,
    http_port: Annotated[int | None, typer.Option(min=0, max=MAX_PORT, hidden=True)] = None,
    no_demo: Annotated[
        bool,
        typer.Option(
            "--no-demo",
            help="Without a configuration, serve only models that `weft run` has added, not the demo model.",
        ),
    ] = False,
    discover: Annotated[
        Discover | None,
        typer.Option(
            help="Without runners in weft.yaml: serve engines and model files found on this machine. Default: ask on "
            "a terminal.",
            show_default=False,
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log to the terminal instead of a file.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Reload weft.yaml when it changes, as weft mesh reload does.")
    ] = False,
    detach: Annotated[
        bool,
        typer.Option(
            "--detach", "-d", help="Run in the background and return when the mesh is ready. Stop it with weft stop."
        ),
    ] = False,
) -> None:
    """Start a mesh on this machine and serve until Ctrl-C, or in the background.

    Without a configuration it looks for engines and models on this machine, and serves them, or the demo model,
    SmolLM2-135M.

    Example: weft up -d --home /tmp/mesh --port 9000, or for other machines as well: weft up --host 0.0.0.0
    """
    if detach:
        if verbose:
            raise invalid_field("--verbose", "cannot be combined with --detach; use weft logs -f to see the logs")
        from weft_app.cli.background import detached  # noqa: PLC0415 - see the module docstring

        detached(context, home, config, network, discover, no_demo=no_demo)
        return
    if sys.platform != WINDOWS:
        with suppress(OSError):  # the mesh continues without its output
            say(f"{STARTING}{__version__} on {home}\n")
    from weft_app.cli.foreground import serve_mesh  # noqa: PLC0415 - see the module docstring

    if http_port is not None:
        note(
            "--http-port, the port of the runner's own API, is now called "
            "--runner-http-port; the mesh's HTTP port is --port"
        )
    serve_mesh(
        home,
        config,
        network,
        runner_http_port=http_port if runner_http_port is None else runner_http_port,
        discover=discover,
        no_demo=no_demo,
        verbose=verbose,
        watch=watch,
    )
