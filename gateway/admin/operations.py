"""/v1/admin/operations: list, get, watch and cancel operations; and the audit log."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.models import ADMIN, SURFACE, plain
from gateway.admin.request import AdminDeps, requester
from gateway.answers.answer_builder import encode_json
from gateway.answers.stream import EventStream
from gateway.answers.unary import json_response
from gateway.intake.headers import require_local_caller
from gateway.intake.query import Query
from gateway.request_facts import facts_of
from weft.documents.operation_documents import OperationDocument
from weft.kernel.names import MAX_NAME_CHARS, require_token

MAX_PAGE_SIZE = 1000
MAX_SEQUENCE = 999_999_999
_OPERATION = f"{ADMIN}/operations/{{name}}"
PAGE_PARAMETERS = ("pageSize", "pageToken", "unfinished")
AUDIT_PARAMETERS = ("after", "pageSize")


async def list_operations(deps: AdminDeps, request: Request) -> Response:
    """Operations, newest first."""
    facts_of(request.scope).surface = SURFACE
    query = Query(request.scope, frozenset(PAGE_PARAMETERS))
    page = await deps.ports.operations.list_page(
        query.count("pageSize", MAX_PAGE_SIZE), query.text("pageToken"), unfinished_only=query.flag("unfinished")
    )
    return json_response(plain(page))


async def get_operation(deps: AdminDeps, request: Request) -> Response:
    """One operation; with watch=1 a stream of server-sent events until it has ended."""
    facts_of(request.scope).surface = SURFACE
    query = Query(request.scope, frozenset({"watch"}))
    name = _name_of(request)
    if query.flag("watch"):
        return EventStream(deps.gateway, _encoded(deps.ports.operations.watch(name)))
    return json_response(plain(await deps.ports.operations.get(name)))


async def cancel_operation(deps: AdminDeps, request: Request) -> Response:
    """Ask for the end of an operation; what a load has loaded so far is unloaded again."""
    facts_of(request.scope).surface = SURFACE
    require_local_caller(request.scope)
    Query(request.scope)
    return json_response(plain(await deps.ports.operations.cancel(_name_of(request), requester(request))))


async def get_audit(deps: AdminDeps, request: Request) -> Response:
    """The audit log, oldest entry first, and its end."""
    facts_of(request.scope).surface = SURFACE
    query = Query(request.scope, frozenset(AUDIT_PARAMETERS))
    after, size = query.count("after", MAX_SEQUENCE, least=0), query.count("pageSize", MAX_PAGE_SIZE)
    return json_response(plain(await deps.ports.operations.audit(after, size)))


def _name_of(request: Request) -> str:
    return f"operations/{require_token(request.path_params['name'], 'name', MAX_NAME_CHARS)}"


async def _encoded(operations: AsyncGenerator[OperationDocument]) -> AsyncGenerator[bytes]:
    async with aclosing(operations):
        async for operation in operations:
            yield b"data: %b\n\n" % encode_json(plain(operation))
