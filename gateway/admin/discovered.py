"""`GET /v1/admin/discovered`: engines and model files of other programs on the machine of `weft up`."""

from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.operations import SURFACE, Admin
from gateway.answers.unary import json_response
from gateway.intake.query import begin_read
from weft.documents.codec import document_of


async def get_discovered(deps: Admin, request: Request) -> Response:
    """Returns engines that run and model files that lie on the mesh's machine, each with its source for a load."""
    begin_read(request, SURFACE)
    return json_response(document_of(await deps.ports.discovery()))
