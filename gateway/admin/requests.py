"""GET /v1/requests and /v1/clients: request records, requests in progress, and clients."""

from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.models import plain
from gateway.answers.unary import json_response
from gateway.intake.headers import require_local_caller, tenant_of
from gateway.intake.query import Query
from gateway.request_facts import facts_of
from weft.dispatch.remote_router import DEFAULT_LISTED, MAX_LISTED, RequestSource
from weft.documents.request_documents import ClientList, RequestList, client_document, request_document
from weft.kernel.names import MAX_REQUEST_ID_CHARS, require_token

SURFACE = "requests"

LIST_PARAMETERS = ("limit",)


async def get_request(requests: RequestSource, request: Request) -> Response:
    """One request of the caller's tenant: where it is, what was decided about it and why, its receipt."""
    facts_of(request.scope).surface = SURFACE
    Query(request.scope)
    request_id = require_token(request.path_params["id"], "id", MAX_REQUEST_ID_CHARS)
    record = await requests.request(request_id, tenant_of(request.scope))
    return json_response(plain(request_document(record)))


async def list_requests(requests: RequestSource, request: Request) -> Response:
    """Requests of the caller's tenant that go on, the oldest first."""
    facts_of(request.scope).surface = SURFACE
    query = Query(request.scope, frozenset(LIST_PARAMETERS))
    limit = query.count("limit", MAX_LISTED) or DEFAULT_LISTED
    found = await requests.requests(limit, tenant_of(request.scope))
    items = tuple(map(request_document, found.requests))
    return json_response(plain(RequestList(kind="RequestList", items=items, total=found.total)))


async def list_clients(requests: RequestSource, request: Request) -> Response:
    """Clients that were seen lately: how they ask, and who has to pause."""
    facts_of(request.scope).surface = SURFACE
    require_local_caller(request.scope)
    Query(request.scope)
    items = tuple(map(client_document, await requests.clients()))
    return json_response(plain(ClientList(kind="ClientList", items=items)))
