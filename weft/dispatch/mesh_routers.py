"""The routers of a mesh with the scheduling domains that each of them owns."""

from weft.api.gateway.v1.mesh_router_pb2 import MeshRouter
from weft.dispatch.domains import Domains, owner_of
from weft.dispatch.fleet import FleetView


def mesh_routers(view: FleetView) -> list[MeshRouter]:
    """Returns the routers of a view by name, with the keys of their domains in order."""
    found = {}
    for name, known in sorted(view.routers.items()):
        found[name] = MeshRouter(
            name=name,
            incarnation=known.incarnation,
            address=known.address,
            version=known.version,
            draining=known.draining,
        )
        if known.registered:
            found[name].register_time.FromNanoseconds(int(known.registered * 1e9))
    for key in sorted(Domains(view).keys):
        owner = owner_of(key, view.routers.values())
        if owner is not None:
            found[owner.name].domains.append(key)
    return list(found.values())
