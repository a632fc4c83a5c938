"""Request handling shared by the admin endpoints that change something: optional body, creation of operations."""

from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.ports import AdminPorts, NewOperation
from gateway.answers.unary import json_response
from gateway.deps import GatewayDeps
from gateway.intake.body import read_json_body
from gateway.intake.headers import headers_of, require_local_caller
from gateway.intake.json_guard import parse
from gateway.intake.query import Query
from gateway.request_facts import facts_of
from weft.api.operations.v1 import operation_pb2
from weft.documents.document_base import DocumentPart
from weft.kernel.log import get_logger
from weft.kernel.names import DEFAULT_TENANT, MAX_TENANT_CHARS, is_token, new_id, require_request_id
from weft.kernel.principal import LOCAL


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminDeps:
    """Collaborators of the endpoints under `/v1/admin`."""

    gateway: GatewayDeps
    ports: AdminPorts


IDEMPOTENCY_KEY = b"idempotency-key"

Body = TypeVar("Body", bound=DocumentPart)

log = get_logger("weft.gateway")


async def empty_body_or(request: Request, deps: GatewayDeps, model: type[Body], surface: str) -> Body:
    """Returns the body as `model`; an empty body counts as `{}`.

    Raises as `parse`, and PERMISSION_DENIED for a foreign page.
    """
    facts_of(request.scope).surface = surface
    require_local_caller(request.scope)
    Query(request.scope)
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
