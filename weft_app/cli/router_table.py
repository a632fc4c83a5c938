"""`weft get routers`: the routers of the mesh, and which of them leads."""

from collections.abc import Sequence
from pathlib import Path

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft_app.cli.follow import show_records
from weft_app.cli.mesh_api import connect
from weft_app.cli.mesh_documents import Document
from weft_app.cli.options import ResourceFormat
from weft_app.cli.output import Column, Listing

_COLUMNS = (
    Column("ROUTER", "name"),
    Column("STATE", lambda router: "leader" if router["leading"] else "standby"),
    Column("ADDRESS", "address"),
    Column("AGE", "registeredAt", "age", ticks=True),
)
_ROUTERS = Listing(
    columns=_COLUMNS,
    wide=(*_COLUMNS, Column("VERSION", "version")),
    name=lambda router: f"router/{router['name']}",
    kind="RouterList",
    plural="routers",
    empty="no router has registered with this mesh's registry",
)


def read_routers(home: Path) -> list[Document]:
    """Returns the routers of the mesh, by name. Raises SERVICE_UNAVAILABLE."""
    with connect(home) as api:
        return list(api.get("/api/v1/routers")["items"])


def show_routers(words: Sequence[str], output: ResourceFormat, home: Path, *, watch: bool = False) -> None:
    """Prints the routers that `words` name, else all; `watch`: until Ctrl-C, with each that changes."""

    def unknown(name: str) -> WeftError:
        return WeftError(Reason.NOT_FOUND, f"there is no router {name}; `weft get routers` lists them")

    show_records(_ROUTERS, words, output, lambda: read_routers(home), unknown, watch=watch)
