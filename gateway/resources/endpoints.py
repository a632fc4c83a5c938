"""GET and DELETE of models, pools, runners, agents and routes under /api/v1."""

from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

from gateway.answers.sse import encode_json
from gateway.intake.headers import require_local_caller
from gateway.intake.query import Query
from gateway.openapi import answers
from gateway.parts import GatewayParts
from gateway.request_facts import facts_of
from gateway.resources.documents import members_body, page_body
from gateway.resources.schema import AgentList, ModelList, PoolList, PoolMembersAnswer, RouteList, RunnerList
from weft.documents.document_base import ResourceKind
from weft.documents.documents import DOCUMENT_TYPES
from weft.documents.yaml_nodes import plain
from weft.kernel.names import require_name

API = "/api/v1"
SURFACE = "api"
MAX_PAGE_SIZE = 1000

_PAGE = frozenset({"pageSize", "pageToken"})
_DELETE_OPTIONS = ("force",)
_LISTS: dict[ResourceKind, type[BaseModel]] = {
    ResourceKind.MODEL: ModelList,
    ResourceKind.AGENT: AgentList,
    ResourceKind.RUNNER: RunnerList,
    ResourceKind.POOL: PoolList,
    ResourceKind.ROUTE: RouteList,
}
_DELETABLE = (ResourceKind.MODEL, ResourceKind.AGENT, ResourceKind.RUNNER, ResourceKind.ROUTE)

Endpoint = Callable[[Request], Awaitable[Response]]

log = structlog.get_logger("weft.gateway")


def add_resources(app: FastAPI, parts: GatewayParts) -> None:
    """Add the routes."""
    for kind in ResourceKind:
        path = f"{API}/{kind.plural}"
        _add(app, path, _list_endpoint(parts, kind), answers(_LISTS[kind], query=("pageSize", "pageToken")))
        _add(app, f"{path}/{{name}}", _get_endpoint(parts, kind), answers(DOCUMENT_TYPES[kind], path="name"))
    _add(app, f"{API}/models/{{name}}/members", _members_endpoint(parts), answers(PoolMembersAnswer, path="name"))
    for kind in _DELETABLE:
        app.add_api_route(
            f"{API}/{kind.plural}/{{name}}",
            _delete_endpoint(parts, kind),
            methods=["DELETE"],
            status_code=204,
            tags=["resources"],
            summary=f"Delete {kind.value}",
            operation_id=f"delete_{kind.value}",
            openapi_extra=answers(None, path="name", query=_DELETE_OPTIONS),
        )


def json_response(body: object, status: int = 200) -> Response:
    """An answer of the admin surface."""
    return Response(encode_json(body), status_code=status, media_type="application/json")


def name_of(request: Request) -> str:
    """The name in the path. Raises INVALID_ARGUMENT for one that no resource can have."""
    return require_name(request.path_params["name"], "name")


def _add(app: FastAPI, path: str, endpoint: Endpoint, extra: dict[str, Any]) -> None:
    name = path.removeprefix(f"{API}/").replace("/{name}", "_by_name").replace("/", "_")
    app.add_api_route(
        path,
        endpoint,
        methods=["GET"],
        tags=["resources"],
        summary=f"Get {name.replace('_', ' ')}",
        operation_id=f"get_{name}",
        openapi_extra=extra,
    )


def _list_endpoint(parts: GatewayParts, kind: ResourceKind) -> Endpoint:
    async def list_resources(request: Request) -> Response:
        """Resources by name, a page at a time."""
        facts_of(request.scope).surface = SURFACE
        query = Query(request.scope, _PAGE)
        size, token = query.count("pageSize", MAX_PAGE_SIZE), query.text("pageToken")
        return json_response(page_body(kind, await parts.registry.list_page(kind, size, token)))

    return list_resources


def _get_endpoint(parts: GatewayParts, kind: ResourceKind) -> Endpoint:
    async def get_resource(request: Request) -> Response:
        """One resource."""
        facts_of(request.scope).surface = SURFACE
        Query(request.scope)
        return json_response(plain(await parts.registry.get(kind, name_of(request))))

    return get_resource


def _members_endpoint(parts: GatewayParts) -> Endpoint:
    async def get_members(request: Request) -> Response:
        """The pool that a model is in, with every member whole."""
        facts_of(request.scope).surface = SURFACE
        Query(request.scope)
        return json_response(members_body(await parts.registry.members(name_of(request))))

    return get_members


def _delete_endpoint(parts: GatewayParts, kind: ResourceKind) -> Endpoint:
    async def delete_resource(request: Request) -> Response:
        """Delete a resource, whoever owns it; a live runner publishes its own again with its next session.

        What a live runner has loaded is refused with 409, or unloaded first with `force`.
        """
        facts = facts_of(request.scope)
        facts.surface = SURFACE
        require_local_caller(request.scope)
        force = Query(request.scope, frozenset(_DELETE_OPTIONS)).flag("force")
        name = name_of(request)
        await parts.registry.delete(kind, name, force=force)
        log.info("resource deleted", request_id=facts.request_id, kind=kind.value, name=name, force=force)
        return Response(status_code=204)

    return delete_resource
