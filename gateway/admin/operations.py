"""Operations and the audit log (/v1/admin/operations, /v1/admin/audit), request records (/v1/requests, /v1/clients)."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.ports import AdminPorts, NewOperation
from gateway.answers.answer_builder import encode_json
from gateway.answers.stream import EventStream
from gateway.answers.unary import json_response
from gateway.deps import GatewayDeps
from gateway.intake.body import read_json_body
from gateway.intake.headers import headers_of, tenant_of
from gateway.intake.json_guard import parse
from gateway.intake.query import begin_change, begin_read
from gateway.request_facts import facts_of
from weft.api.operations.v1 import operation_pb2
from weft.dispatch.remote_router import DEFAULT_LISTED, MAX_LISTED, RequestSource
from weft.documents.document_base import DocumentPart
from weft.documents.operation_documents import OperationDocument
from weft.documents.request_documents import ClientList, RequestList, client_document, request_document
from weft.kernel.log import get_logger
from weft.kernel.names import (
    DEFAULT_TENANT,
    MAX_NAME_CHARS,
    MAX_REQUEST_ID_CHARS,
    MAX_TENANT_CHARS,
    is_token,
    new_id,
    require_request_id,
    require_token,
)
from weft.kernel.principal import LOCAL


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminDeps:
    """Collaborators of the endpoints under `/v1/admin`."""

    gateway: GatewayDeps
    ports: AdminPorts


IDEMPOTENCY_KEY = b"idempotency-key"

Body = TypeVar("Body", bound=DocumentPart)

log = get_logger("weft.gateway")


async def read_optional_body(request: Request, deps: GatewayDeps, model: type[Body], surface: str) -> Body:
    """Returns the body as `model`; an empty body counts as `{}`.

    Raises as `parse`, and PERMISSION_DENIED for a foreign page.
    """
    begin_change(request, surface)
    headers = headers_of(request.scope)
    is_empty = headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in headers
    raw = b"{}" if is_empty else await read_json_body(request.scope, request.receive, deps.config)
    return parse(model, raw, max_depth=deps.config.limits.max_json_depth)


async def create_operation(
    request: Request, ports: AdminPorts, action: operation_pb2.OperationAction, authorization: str
) -> Response:
    """Creates an operation; returns 202 with its location. Raises the registry's refusal."""
    headers = headers_of(request.scope)
    key = headers.get(IDEMPOTENCY_KEY, b"").decode("latin-1")
    wanted = NewOperation(
        action=action,
        request_id=require_request_id(key, "Idempotency-Key") if key else new_id("op"),
        requested_by=requester(request),
        authorization=authorization,
    )
    operation = await ports.operations.create(wanted)
    log.info("operation asked for", request_id=facts_of(request.scope).request_id, operation=operation.name)
    response = json_response(operation.model_dump(mode="json", by_alias=True, exclude_none=True), 202)
    response.headers["location"] = f"/v1/admin/{operation.name}"
    return response


def requester(request: Request) -> str:
    """Returns the caller's name for the audit log: its key, or its self-reported tenant where no key is needed."""
    principal = facts_of(request.scope).principal
    if principal is not LOCAL:
        return principal.name
    tenant = headers_of(request.scope).get(b"x-tenant-id", b"").decode("latin-1")
    return f"http:{tenant if is_token(tenant, MAX_TENANT_CHARS) else DEFAULT_TENANT}"


SURFACE = "admin"


def plain(document: DocumentPart) -> object:
    """Returns a document as JSON types, without unset fields."""
    return document.model_dump(mode="json", by_alias=True, exclude_none=True)


MAX_PAGE_SIZE = 1000
MAX_SEQUENCE = 999_999_999
PAGE_PARAMETERS = ("pageSize", "pageToken", "unfinished")
AUDIT_PARAMETERS = ("after", "pageSize")


async def list_operations(deps: AdminDeps, request: Request) -> Response:
    """Lists operations, newest first."""
    query = begin_read(request, SURFACE, PAGE_PARAMETERS)
    page = await deps.ports.operations.list_page(
        query.count("pageSize", MAX_PAGE_SIZE), query.text("pageToken"), unfinished_only=query.flag("unfinished")
    )
    return json_response(plain(page))


async def get_operation(deps: AdminDeps, request: Request) -> Response:
    """Returns one operation; with watch=1 a stream of server-sent events until it has ended."""
    query = begin_read(request, SURFACE, ("watch",))
    name = _name_of(request)
    if query.flag("watch"):
        return EventStream(deps.gateway, _encoded(deps.ports.operations.watch(name)))
    return json_response(plain(await deps.ports.operations.get(name)))


async def cancel_operation(deps: AdminDeps, request: Request) -> Response:
    """Requests the cancellation of an operation; a cancelled load is unloaded again."""
    begin_change(request, SURFACE)
    return json_response(plain(await deps.ports.operations.cancel(_name_of(request), requester(request))))


async def get_audit(deps: AdminDeps, request: Request) -> Response:
    """Returns entries of the audit log, oldest first, and the hash of its newest entry."""
    query = begin_read(request, SURFACE, AUDIT_PARAMETERS)
    after, size = query.count("after", MAX_SEQUENCE, least=0), query.count("pageSize", MAX_PAGE_SIZE)
    return json_response(plain(await deps.ports.operations.audit(after, size)))


def _name_of(request: Request) -> str:
    return f"operations/{require_token(request.path_params['name'], 'name', MAX_NAME_CHARS)}"


async def _encoded(operations: AsyncGenerator[OperationDocument]) -> AsyncGenerator[bytes]:
    async with aclosing(operations):
        async for operation in operations:
            yield b"data: %b\n\n" % encode_json(plain(operation))


REQUESTS_SURFACE = "requests"

REQUEST_LIST_PARAMETERS = ("limit",)


async def get_request(requests: RequestSource, request: Request) -> Response:
    """Returns one request of the caller's tenant: its state, the decisions about it with their reasons, its receipt."""
    begin_read(request, REQUESTS_SURFACE)
    request_id = require_token(request.path_params["id"], "id", MAX_REQUEST_ID_CHARS)
    record = await requests.request(request_id, tenant_of(request.scope))
    return json_response(plain(request_document(record)))


async def list_requests(requests: RequestSource, request: Request) -> Response:
    """Lists the running requests of the caller's tenant, oldest first."""
    query = begin_read(request, REQUESTS_SURFACE, REQUEST_LIST_PARAMETERS)
    limit = query.count("limit", MAX_LISTED) or DEFAULT_LISTED
    found = await requests.requests(limit, tenant_of(request.scope))
    items = tuple(map(request_document, found.requests))
    return json_response(plain(RequestList(kind="RequestList", items=items, total=found.total)))


async def list_clients(requests: RequestSource, request: Request) -> Response:
    """Lists recently seen clients: their request patterns, and the pauses imposed on them."""
    begin_change(request, REQUESTS_SURFACE)
    items = tuple(map(client_document, await requests.clients()))
    return json_response(plain(ClientList(kind="ClientList", items=items)))
