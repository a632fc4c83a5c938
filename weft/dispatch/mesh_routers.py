"""The routers of a mesh as documents."""

from weft.api.gateway.v1.mesh_router_pb2 import MeshRouter
from weft.dispatch.fleet import FleetView


def mesh_routers(view: FleetView) -> list[MeshRouter]:
    """Returns the routers of a view by name."""
    found = []
    for name, known in sorted(view.routers.items()):
        router = MeshRouter(
            name=name,
            incarnation=known.incarnation,
            address=known.address,
            version=known.version,
            leading=known.leading,
        )
        if known.registered:
            router.register_time.FromNanoseconds(int(known.registered * 1e9))
        found.append(router)
    return found
