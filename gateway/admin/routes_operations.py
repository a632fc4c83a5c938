"""GET /v1/admin/operations, one of them as it is or as a stream, its end, and the audit log."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import FastAPI, Request, Response

from gateway.admin.ports import AdminPorts
from gateway.admin.request import requester
from gateway.admin.routes_models import ADMIN, SURFACE, plain
from gateway.answers.event_stream import EventStream
from gateway.answers.sse import encode_json
from gateway.answers.unary import json_response
from gateway.intake.headers import require_local_caller
from gateway.intake.query import Query
from gateway.openapi import answers
from gateway.parts import GatewayParts
from gateway.request_facts import facts_of
from weft.documents.operation_documents import AuditList, OperationDocument, OperationList
from weft.kernel.names import MAX_NAME_CHARS, require_token

MAX_PAGE_SIZE = 1000
MAX_SEQUENCE = 999_999_999
_OPERATION = f"{ADMIN}/operations/{{name}}"
_PAGE = ("pageSize", "pageToken", "unfinished")
_AUDIT = ("after", "pageSize")


def add_admin_operations(app: FastAPI, parts: GatewayParts, ports: AdminPorts) -> None:
    """Add the routes."""

    async def list_operations(request: Request) -> Response:
        """Operations, newest first."""
        facts_of(request.scope).surface = SURFACE
        query = Query(request.scope, frozenset(_PAGE))
        page = await ports.operations.list_page(
            query.count("pageSize", MAX_PAGE_SIZE), query.text("pageToken"), unfinished_only=query.flag("unfinished")
        )
        return json_response(plain(page))

    async def get_operation(request: Request) -> Response:
        """One operation; with watch=1 a stream of server-sent events until it has ended."""
        facts_of(request.scope).surface = SURFACE
        query = Query(request.scope, frozenset({"watch"}))
        name = _name_of(request)
        if query.flag("watch"):
            return EventStream(parts, _encoded(ports.operations.watch(name)))
        return json_response(plain(await ports.operations.get(name)))

    async def cancel_operation(request: Request) -> Response:
        """Ask for the end of an operation; what a load has loaded so far is unloaded again."""
        facts_of(request.scope).surface = SURFACE
        require_local_caller(request.scope)
        Query(request.scope)
        return json_response(plain(await ports.operations.cancel(_name_of(request), requester(request))))

    async def get_audit(request: Request) -> Response:
        """The audit log, oldest entry first, and its end."""
        facts_of(request.scope).surface = SURFACE
        query = Query(request.scope, frozenset(_AUDIT))
        after, size = query.count("after", MAX_SEQUENCE, least=0), query.count("pageSize", MAX_PAGE_SIZE)
        return json_response(plain(await ports.operations.audit(after, size)))

    for path, endpoint, method, extra in (
        (f"{ADMIN}/operations", list_operations, "GET", answers(OperationList, query=_PAGE)),
        (_OPERATION, get_operation, "GET", answers(OperationDocument, path="name", query=("watch",))),
        (_OPERATION, cancel_operation, "DELETE", answers(OperationDocument, path="name")),
        (f"{ADMIN}/audit", get_audit, "GET", answers(AuditList, query=_AUDIT)),
    ):
        app.add_api_route(path, endpoint, methods=[method], tags=["admin"], openapi_extra=extra)


def _name_of(request: Request) -> str:
    return f"operations/{require_token(request.path_params['name'], 'name', MAX_NAME_CHARS)}"


async def _encoded(operations: AsyncGenerator[OperationDocument]) -> AsyncGenerator[bytes]:
    async with aclosing(operations):
        async for operation in operations:
            yield b"data: %b\n\n" % encode_json(plain(operation))
