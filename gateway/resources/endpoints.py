"""GET and DELETE of models, pools, runners, agents and routes under /api/v1."""

from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

from gateway.answers.event_stream import EventStream, encoded_events
from gateway.answers.unary import json_response
from gateway.intake.body import read_json_body
from gateway.intake.headers import require_local_caller
from gateway.intake.json_guard import parse
from gateway.intake.query import Query
from gateway.openapi import answers, json_body
from gateway.parts import GatewayParts
from gateway.ports import EventFilter, MeshSettings
from gateway.request_facts import facts_of
from gateway.resources.documents import (
    AgentList,
    EventList,
    MeshConfig,
    ModelList,
    PoolList,
    PoolMembersAnswer,
    RouteList,
    RunnerList,
    events_body,
    members_body,
    page_body,
)
from weft.documents.document_base import ResourceKind, parse_kind
from weft.documents.documents import DOCUMENT_TYPES
from weft.documents.yaml_nodes import plain
from weft.kernel.errors import invalid_field
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


MAX_EVENTS = 1000

_PARAMETERS = ("kind", "name", "limit", "watch")


def add_events(app: FastAPI, parts: GatewayParts) -> None:
    """Add the route."""

    async def get_events(request: Request) -> Response:
        """The newest events, oldest first; or with watch=1 a stream of server-sent events from now on."""
        facts_of(request.scope).surface = SURFACE
        query = Query(request.scope, frozenset(_PARAMETERS))
        wanted, limit = _filter_of(query), query.count("limit", MAX_EVENTS)
        if query.flag("watch"):
            if limit:
                raise invalid_field("limit", "goes with a list; a watch has no end")
            return EventStream(parts, encoded_events(parts.registry.watch_events(wanted)))
        return json_response(events_body(await parts.registry.list_events(wanted, limit)))

    app.add_api_route(
        f"{API}/events",
        get_events,
        methods=["GET"],
        tags=["resources"],
        openapi_extra=answers(EventList, query=_PARAMETERS),
    )


def _filter_of(query: Query) -> EventFilter:
    kind = parse_kind(query.text("kind"), "kind") if "kind" in query else None
    if "name" not in query:
        return EventFilter(kind=kind)
    if kind is None:
        raise invalid_field("kind", "is required with name")
    return EventFilter(kind=kind, name=require_name(query.text("name"), "name"))


PATH = f"{API}/config"


def add_settings(app: FastAPI, parts: GatewayParts) -> None:
    """Add the routes."""
    depth = parts.config.limits.max_json_depth

    async def get_config(request: Request) -> Response:
        """What is set for the whole mesh."""
        facts_of(request.scope).surface = SURFACE
        Query(request.scope)
        return json_response(_body(await parts.registry.settings()))

    async def put_config(request: Request) -> Response:
        """Set it. The answer comes once it is kept; routers hear of it at once."""
        facts = facts_of(request.scope)
        facts.surface = SURFACE
        require_local_caller(request.scope)
        Query(request.scope)
        raw = await read_json_body(request.scope, request.receive, parts.config)
        wanted = parse(MeshConfig, raw, max_depth=depth)
        settings = await parts.registry.update_settings(MeshSettings(allow_cloud_fallback=wanted.allow_cloud_fallback))
        log.info("settings changed", request_id=facts.request_id, allow_cloud_fallback=settings.allow_cloud_fallback)
        return json_response(_body(settings))

    app.add_api_route(PATH, get_config, methods=["GET"], tags=["settings"], openapi_extra=answers(MeshConfig))
    app.add_api_route(
        PATH,
        put_config,
        methods=["PUT"],
        tags=["settings"],
        openapi_extra=json_body(MeshConfig) | answers(MeshConfig),
    )


def _body(settings: MeshSettings) -> dict[str, object]:
    return {"allowCloudFallback": settings.allow_cloud_fallback}
