"""/api/v1: list, get and delete resources; events; settings of the mesh."""

from collections.abc import Awaitable, Callable

import structlog
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.event_stream import EventStream, encoded_events
from gateway.answers.unary import json_response
from gateway.deps import GatewayDeps
from gateway.intake.body import read_json_body
from gateway.intake.headers import require_local_caller
from gateway.intake.json_guard import parse
from gateway.intake.query import Query
from gateway.ports import EventFilter, MeshSettings
from gateway.request_facts import facts_of
from gateway.resources.documents import (
    AgentList,
    MeshConfig,
    ModelList,
    PoolList,
    RouteList,
    RunnerList,
    events_body,
    members_body,
    page_body,
)
from weft.documents.document_base import ResourceKind, parse_kind
from weft.documents.yaml_nodes import plain
from weft.kernel.errors import invalid_field
from weft.kernel.names import require_name

API = "/api/v1"
SURFACE = "api"
MAX_PAGE_SIZE = 1000

PAGE_PARAMETERS = ("pageSize", "pageToken")
DELETE_PARAMETERS = ("force",)
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


def name_of(request: Request) -> str:
    """Returns the name in the path. Raises INVALID_ARGUMENT for an invalid one."""
    return require_name(request.path_params["name"], "name")


async def list_resources(kind: ResourceKind, deps: GatewayDeps, request: Request) -> Response:
    """Resources by name, a page at a time."""
    facts_of(request.scope).surface = SURFACE
    query = Query(request.scope, frozenset(PAGE_PARAMETERS))
    size, token = query.count("pageSize", MAX_PAGE_SIZE), query.text("pageToken")
    return json_response(page_body(kind, await deps.registry.list_page(kind, size, token)))


async def get_resource(kind: ResourceKind, deps: GatewayDeps, request: Request) -> Response:
    """One resource."""
    facts_of(request.scope).surface = SURFACE
    Query(request.scope)
    return json_response(plain(await deps.registry.get(kind, name_of(request))))


async def get_members(deps: GatewayDeps, request: Request) -> Response:
    """The pool that a model is in, with every member whole."""
    facts_of(request.scope).surface = SURFACE
    Query(request.scope)
    return json_response(members_body(await deps.registry.members(name_of(request))))


async def delete_resource(kind: ResourceKind, deps: GatewayDeps, request: Request) -> Response:
    """Delete a resource, whoever owns it; a live runner publishes its own again with its next session.

    What a live runner has loaded is refused with 409, or unloaded first with `force`.
    """
    facts = facts_of(request.scope)
    facts.surface = SURFACE
    require_local_caller(request.scope)
    force = Query(request.scope, frozenset(DELETE_PARAMETERS)).flag("force")
    name = name_of(request)
    await deps.registry.delete(kind, name, force=force)
    log.info("resource deleted", request_id=facts.request_id, kind=kind.value, name=name, force=force)
    return Response(status_code=204)


MAX_EVENTS = 1000

EVENT_PARAMETERS = ("kind", "name", "limit", "watch")


async def get_events(deps: GatewayDeps, request: Request) -> Response:
    """The newest events, oldest first; or with watch=1 a stream of server-sent events from now on."""
    facts_of(request.scope).surface = SURFACE
    query = Query(request.scope, frozenset(EVENT_PARAMETERS))
    wanted, limit = _filter_of(query), query.count("limit", MAX_EVENTS)
    if query.flag("watch"):
        if limit:
            raise invalid_field("limit", "goes with a list; a watch has no end")
        return EventStream(deps, encoded_events(deps.registry.watch_events(wanted)))
    return json_response(events_body(await deps.registry.list_events(wanted, limit)))


def _filter_of(query: Query) -> EventFilter:
    kind = parse_kind(query.text("kind"), "kind") if "kind" in query else None
    if "name" not in query:
        return EventFilter(kind=kind)
    if kind is None:
        raise invalid_field("kind", "is required with name")
    return EventFilter(kind=kind, name=require_name(query.text("name"), "name"))


PATH = f"{API}/config"


async def get_config(deps: GatewayDeps, request: Request) -> Response:
    """What is set for the whole mesh."""
    facts_of(request.scope).surface = SURFACE
    Query(request.scope)
    return json_response(_body(await deps.registry.settings()))


async def put_config(deps: GatewayDeps, request: Request) -> Response:
    """Set it. The answer comes once it is kept; routers hear of it at once."""
    facts = facts_of(request.scope)
    facts.surface = SURFACE
    require_local_caller(request.scope)
    Query(request.scope)
    raw = await read_json_body(request.scope, request.receive, deps.config)
    wanted = parse(MeshConfig, raw, max_depth=deps.config.limits.max_json_depth)
    settings = await deps.registry.update_settings(MeshSettings(allow_cloud_fallback=wanted.allow_cloud_fallback))
    log.info("settings changed", request_id=facts.request_id, allow_cloud_fallback=settings.allow_cloud_fallback)
    return json_response(_body(settings))


def _body(settings: MeshSettings) -> dict[str, object]:
    return {"allowCloudFallback": settings.allow_cloud_fallback}
