"""`weft models attach` and `weft models detach`: servers that run already, added to a mesh that runs."""

from pathlib import Path
from typing import Annotated

import typer

from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.models.model_source import server_source
from weft.kernel.values.names import require_name
from weft_app.cli.mesh_api import Document, connect
from weft_app.cli.operations import WATCH_TIMEOUT_SECONDS, TokenOption, begin, read_token, say_outcome
from weft_app.cli.options import DEFAULT_HOME, HomeOption


def attach(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server's address, such as http://box.lan:11434.")],
    *,
    name: Annotated[str, typer.Option(help="Name of the server in the mesh. Default: derived from its address.")] = "",
    api_key_env: Annotated[
        str,
        typer.Option(
            help="Environment variable of the runner with the server's API key: WEFT_KEY_... or one of key_variables."
        ),
    ] = "",
    remote: Annotated[
        bool | None,
        typer.Option("--remote/--no-remote", help="Whether the server is outside your own networks (remote)."),
    ] = None,
    runner: Annotated[str, typer.Option(help="Runner that connects to the server. Default: the only one.")] = "",
    token: TokenOption = None,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Serve all models of a running server, without a restart of the mesh, and follow changes of its list.

    The mesh remembers it over restarts, until `weft models detach`. weft never starts or stops the server.

    Example: weft models attach http://box.lan:11434 --name box
    """
    address = url if "://" in url else f"http://{url}"
    if server_source(address, "URL") is None:
        raise invalid_field("URL", "must be the address of a server, such as http://box.lan:11434 or https://host/v1")
    given = {"api_key_env": api_key_env or None, "remote": remote}
    parameters = {key: value for key, value in given.items() if value is not None}
    model = require_name(name, "--name") if name else ""
    load = {"type": "load", "model": model, "source": address, "runner": runner, "settings": {"parameters": parameters}}
    _carry_out(load, token, home)


def detach(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The server's name in the mesh.")],
    token: TokenOption = None,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Stop serving the models of an attached server after their running requests. The server keeps running.

    Example: weft models detach box
    """
    _carry_out({"type": "detach", "model": require_name(name, "NAME")}, token, home)


def _carry_out(action: Document, token: str | None, home: Path) -> None:
    authorization = "" if token is None else read_token(token)
    with connect(home, WATCH_TIMEOUT_SECONDS) as api:
        say_outcome(api, begin(api, action, authorization=authorization))
