"""`weft attach` and `weft detach`: servers that run already, added to a mesh that runs."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import typer

from weft.documents.field_names import operation_field
from weft.kernel.errors import invalid_field
from weft.kernel.model_source import server_source
from weft.kernel.names import require_name
from weft_app.cli.mesh_api import connect
from weft_app.cli.mesh_documents import Document
from weft_app.cli.operations import WATCH_TIMEOUT_SECONDS, TokenOption, begin, read_token, say_outcome
from weft_app.cli.options import DEFAULT_HOME, HomeOption, naming_fields, reporting

_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "name": "--name",
        "source": "URL",
        "runner": "--runner",
        "parameters.api_key_env": "--api-key-env",
        "parameters.remote": "--remote",
        "authorization": "--token",
        "model": "NAME",
    }
)
"""Options and arguments by the fields of operations."""


def _option_of(field: str) -> str:
    name = operation_field(field)
    return _OPTIONS.get(name, name)


def attach(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server's address, such as http://box.lan:11434.")],
    *,
    name: Annotated[str, typer.Option("--name", help="Name of the server in the mesh. Default: by its address.")] = "",
    api_key_env: Annotated[
        str, typer.Option("--api-key-env", help="Environment variable of the runner that holds the server's key.")
    ] = "",
    remote: Annotated[
        bool | None, typer.Option("--remote/--no-remote", help="Whether it is remote, beyond your own networks.")
    ] = None,
    runner: Annotated[str, typer.Option("--runner", help="The runner that reaches it. Default: the only one.")] = "",
    token: TokenOption = None,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Serve every model that a running server lists, without a restart of the mesh; its list is followed.

    The mesh remembers it over restarts, until `weft detach`. weft never starts or stops the server.

    Example: weft attach http://box.lan:11434 --name box
    """
    with reporting():
        address = url if "://" in url else f"http://{url}"
        if server_source(address, "URL") is None:
            raise invalid_field(
                "URL", "must be the address of a server, such as http://box.lan:11434 or https://host/v1"
            )
        parameters = {"api_key_env": api_key_env or None, "remote": remote}
        settings = {"parameters": {key: value for key, value in parameters.items() if value is not None}}
        load = {"type": "load", "source": address, "runner": runner, "settings": settings}
        with naming_fields(_option_of):
            _carry_out(load | {"model": require_name(name, "--name") if name else ""}, token, home)


def detach(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The server's name in the mesh.")],
    token: TokenOption = None,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Serve the models of an attached server no longer; running requests end first, and the server runs on.

    Example: weft detach box
    """
    with reporting(), naming_fields(lambda field: "NAME" if field == "name" else field):
        _carry_out({"type": "detach", "model": require_name(name, "NAME")}, token, home)


def _carry_out(action: Document, token: str | None, home: Path) -> None:
    authorization = "" if token is None else read_token(token)
    with connect(home, WATCH_TIMEOUT_SECONDS) as api:
        say_outcome(api, begin(api, action, authorization=authorization))
