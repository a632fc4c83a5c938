"""`weft ui`: the workbench of the mesh on this machine, in the browser."""

import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft_app.cli.options import DEFAULT_HOME, HomeOption
from weft_app.cli.output import say
from weft_app.compose.home import WeftHome

PAGE = "/ui/"


def ui(
    only_print: Annotated[bool, typer.Option("--print", help="Print the address and open nothing.")] = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Open the workbench, the web page of the mesh, and print its address.

    Where callers need a key the page asks for one.

    Example: weft ui --print
    """
    address = workbench_address(home)
    say(f"{address}\n")
    if not only_print and not webbrowser.open(address):
        sys.stderr.write("weft: no browser could be opened here; open the address in one\n")


def workbench_address(home: Path) -> str:
    """Returns the address of the workbench. Raises SERVICE_UNAVAILABLE where no mesh runs on the home."""
    root = WeftHome(home.expanduser().absolute())
    running = root.running()
    if running is None or "url" not in running:
        raise WeftError(Reason.SERVICE_UNAVAILABLE, f"no mesh runs on {root.root}; start one with `weft up`")
    return f"{running['url']}{PAGE}"
