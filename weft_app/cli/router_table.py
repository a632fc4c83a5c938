"""`weft get routers`: the routers of the mesh, and which scheduling domains each of them owns."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from weft.api.registry.v1 import registry_service_pb2, router_pb2
from weft.client.resources import connect_registry
from weft.dispatch.domains import Domains, owner_of
from weft.dispatch.fleet import FleetView, apply_watch
from weft.documents.codec import document_of
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason
from weft_app.cli.options import ResourceFormat
from weft_app.cli.output import Column, Listing
from weft_app.cli.record_watch import RecordChanges, follow_readings

READ_TIMEOUT_SECONDS = 5.0
MAX_SHOWN_DOMAINS = 4


class RouterRow(NamedTuple):
    """One router, with the keys of its domains in the order of names."""

    router: router_pb2.Router
    domains: tuple[str, ...]


def _domain_words(row: RouterRow) -> str:
    shown = ",".join(row.domains[:MAX_SHOWN_DOMAINS]) or "-"
    left = len(row.domains) - MAX_SHOWN_DOMAINS
    return f"{shown} and {left} more" if left > 0 else shown


_COLUMNS = (
    Column("ROUTER", "{router.name}"),
    Column("STATE", lambda row: "draining" if row.router.draining else "active"),
    Column("DOMAINS", lambda row: str(len(row.domains))),
    Column("ADDRESS", "{router.address}"),
    Column("AGE", "[{router.register_time:age}]", ticks=True),
)
_ROUTERS = Listing(
    columns=_COLUMNS,
    wide=(*_COLUMNS, Column("VERSION", "{router.version}"), Column("OWNS", _domain_words)),
    name=lambda row: f"router/{row.router.name}",
    kind="RouterList",
    plural="routers",
    document=lambda row: {
        "kind": "router",
        "name": row.router.name,
        **document_of(row.router),
        "domains": list(row.domains),
    },
    empty="no router has registered with this mesh's registry",
)


class RouterRows:
    """The routers of the mesh as the registry's watch reports them."""

    def __init__(self) -> None:
        self._view = FleetView()
        self._routers: dict[str, router_pb2.Router] = {}

    def take(self, response: registry_service_pb2.WatchResponse) -> list[RouterRow]:
        """Returns the routers by name after one more response."""
        self._view = apply_watch(self._view, response)
        if response.WhichOneof("kind") == "snapshot":
            self._routers = {router.name: router for router in response.snapshot.routers}
        elif response.change.HasField("router"):
            self._routers[response.change.router.name] = response.change.router
        elif response.change.HasField("deleted_router"):
            self._routers.pop(response.change.deleted_router, None)
        owned: dict[str, list[str]] = {name: [] for name in sorted(self._routers)}
        for key in sorted(Domains(self._view).keys):
            owner = owner_of(key, self._view.routers.values())
            if owner is not None:
                owned[owner.name].append(key)
        return [RouterRow(self._routers[name], tuple(keys)) for name, keys in owned.items()]


def _readings(home: Path, timeout_seconds: float | None = None) -> Iterator[list[RouterRow]]:
    rows = RouterRows()
    with connect_registry(home=home) as registry:
        for response in registry.watch(timeout_seconds):
            yield rows.take(response)


def read_routers(home: Path) -> list[router_pb2.Router]:
    """Returns the routers of the mesh, by name. Raises SERVICE_UNAVAILABLE."""
    return [row.router for row in next(_readings(home, READ_TIMEOUT_SECONDS))]


def show_routers(words: Sequence[str], output: ResourceFormat, home: Path, *, watch: bool = False) -> None:
    """Prints the routers that `words` name, else all; `watch`: until Ctrl-C, with each that changes."""
    if output is ResourceFormat.YAML:
        raise invalid_field("--output", "must be table, wide, json or name: routers are not declared")
    named = {word.partition("/")[2] for word in words} if "/" in words[0] else set(words[1:])

    def picked(rows: Sequence[RouterRow]) -> list[RouterRow]:
        return [row for row in rows if not named or row.router.name in named]

    if watch:
        follow_readings(RecordChanges(_ROUTERS, output), lambda: map(picked, _readings(home)))
        return
    found = picked(next(_readings(home, READ_TIMEOUT_SECONDS)))
    if missing := named - {row.router.name for row in found}:
        raise WeftError(Reason.NOT_FOUND, f"there is no router {min(missing)}; `weft get routers` lists them")
    _ROUTERS.print(found, output)
