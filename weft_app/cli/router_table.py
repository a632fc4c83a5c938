"""`weft get routers`: the routers of the mesh, and which of them leads."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from weft.api.gateway.v1.mesh_router_pb2 import MeshRouter
from weft.client.resources import connect_registry
from weft.dispatch.fleet import FleetView, apply_watch
from weft.dispatch.mesh_routers import mesh_routers
from weft.documents.codec import document_of
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason
from weft_app.cli.options import ResourceFormat
from weft_app.cli.output import Column, Listing
from weft_app.cli.record_watch import RecordChanges, follow_readings

READ_TIMEOUT_SECONDS = 5.0
_COLUMNS = (
    Column("ROUTER", "{name}"),
    Column("STATE", lambda router: "leader" if router.leading else "standby"),
    Column("ADDRESS", "{address}"),
    Column("AGE", "[{register_time:age}]", ticks=True),
)
_ROUTERS = Listing(
    columns=_COLUMNS,
    wide=(*_COLUMNS, Column("VERSION", "{version}")),
    name=lambda router: f"router/{router.name}",
    kind="RouterList",
    plural="routers",
    document=document_of,
    empty="no router has registered with this mesh's registry",
)


def _readings(home: Path, timeout_seconds: float | None = None) -> Iterator[list[MeshRouter]]:
    view = FleetView()
    with connect_registry(home=home) as registry:
        for response in registry.watch(timeout_seconds):
            view = apply_watch(view, response)
            yield mesh_routers(view)


def read_routers(home: Path) -> list[MeshRouter]:
    """Returns the routers of the mesh, by name. Raises SERVICE_UNAVAILABLE."""
    return next(_readings(home, READ_TIMEOUT_SECONDS))


def show_routers(words: Sequence[str], output: ResourceFormat, home: Path, *, watch: bool = False) -> None:
    """Prints the routers that `words` name, else all; `watch`: until Ctrl-C, with each that changes."""
    if output is ResourceFormat.YAML:
        raise invalid_field("--output", "must be table, wide, json or name: routers are not declared")
    named = {word.partition("/")[2] for word in words} if "/" in words[0] else set(words[1:])

    def picked(routers: Sequence[MeshRouter]) -> list[MeshRouter]:
        return [router for router in routers if not named or router.name in named]

    if watch:
        follow_readings(RecordChanges(_ROUTERS, output), lambda: map(picked, _readings(home)))
        return
    found = picked(next(_readings(home, READ_TIMEOUT_SECONDS)))
    if missing := named - {router.name for router in found}:
        raise WeftError(Reason.NOT_FOUND, f"there is no router {min(missing)}; `weft get routers` lists them")
    _ROUTERS.print(found, output)
