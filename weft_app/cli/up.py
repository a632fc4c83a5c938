"""`weft up`: a whole mesh on this machine, until Ctrl-C.

The services are imported when it runs, see `weft_app.cli.serve`.
"""

import os
from functools import partial
from typing import Annotated, Any

import typer
import uvloop

from weft.kernel.telemetry import configure_logging
from weft_app.cli.options import DEFAULT_HOME, ConfigOption, HomeOption
from weft_app.cli.serving import serving
from weft_app.compose.demo import with_http_port
from weft_app.compose.home import WeftHome
from weft_app.compose.runner_environment import with_model_folders
from weft_app.config.loader import load_config


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
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Logs on the terminal, not in a file.")] = False,
) -> None:
    """Start a mesh on this machine and serve until Ctrl-C.

    Without a configuration it serves the demo model, SmolLM2-135M.

    Example: weft up --home /tmp/mesh --port 9000
    """
    with serving():
        overrides: dict[str, Any] = {"port": port, "grpc_port": grpc_port}
        given = {name: value for name, value in overrides.items() if value is not None}
        loaded = load_config(config, given, partial(with_model_folders, environment=os.environ))
        if http_port is not None:
            loaded = with_http_port(loaded, http_port)
        folder = WeftHome(home.expanduser().absolute())
        folder.create()
        log_file = None if verbose else folder.log_file("host", loaded.log.max_file_bytes)
        configure_logging("host", level=loaded.log.level, file=log_file)
        from weft_app.cli.mesh import run_up  # noqa: PLC0415 - see the module docstring

        with folder.claim():
            uvloop.run(run_up(loaded, folder, config))
