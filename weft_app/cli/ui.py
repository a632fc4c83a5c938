"""`weft ui`: the workbench of a mesh, in the browser."""

import webbrowser
from typing import Annotated

import typer

from weft_app.cli.mesh_api import gateway_url
from weft_app.cli.options import DEFAULT_HOME, HomeOption
from weft_app.cli.terminal import note, say

PAGE = "/ui/"


def ui(
    only_print: Annotated[bool, typer.Option("--print", help="Print the address and open nothing.")] = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Open the workbench, the web page of the mesh, and print its address.

    The mesh is that of --home, of WEFT_URL, or the one that runs on the home. If callers need a key, the page asks for
    it.

    Example: weft ui --print
    """
    address = f"{gateway_url(home)}{PAGE}"
    say(f"{address}\n")
    if not only_print and not webbrowser.open(address):
        note("no browser could be opened; open the address yourself")
