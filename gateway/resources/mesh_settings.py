"""GET and PUT /api/v1/config: what holds for the whole mesh."""

import structlog
from fastapi import FastAPI, Request, Response

from gateway.intake.body import read_json_body
from gateway.intake.headers import require_local_caller
from gateway.intake.json_guard import parse
from gateway.intake.query import Query
from gateway.openapi import answers, json_body
from gateway.parts import GatewayParts
from gateway.ports import MeshSettings
from gateway.request_facts import facts_of
from gateway.resources.endpoints import API, SURFACE, json_response
from gateway.resources.schema import MeshConfig

PATH = f"{API}/config"

log = structlog.get_logger("weft.gateway")


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
