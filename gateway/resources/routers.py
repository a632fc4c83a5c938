"""`GET /api/v1/routers`: the routers of the mesh, and which of them is the leader."""

from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.unary import json_response
from gateway.deps import Gateway
from gateway.intake.query import begin_read
from gateway.resources.resource_handlers import SURFACE
from weft.api.gateway.v1.mesh_router_pb2 import MeshRouter, MeshRouterList
from weft.dispatch.fleet import FleetView
from weft.documents.codec import document_of


def mesh_routers(view: FleetView) -> list[MeshRouter]:
    """Returns the routers of a view by name."""
    return [
        MeshRouter(
            name=name,
            incarnation=known.incarnation,
            address=known.address,
            version=known.version,
            leading=known.leading,
            register_time=known.register_time if known.HasField("register_time") else None,
        )
        for name, known in sorted(view.routers.items())
    ]


async def list_routers(deps: Gateway, request: Request) -> Response:
    """Lists the routers of the mesh by name, and which of them leads."""
    begin_read(request, SURFACE)
    return json_response(document_of(MeshRouterList(routers=mesh_routers(deps.fleet.view))))
