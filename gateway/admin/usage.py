"""Usage of the caller's tenant (`/v1/usage`) and of all tenants (`/v1/admin/usage`)."""

from typing import Annotated

from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.unary import json_response
from gateway.deps import Gateway, GatewayDeps
from gateway.intake.headers import tenant_of
from gateway.intake.query import Query, begin_read
from gateway.routing import collaborator
from weft.api.router.v1 import usage_service_pb2 as pb
from weft.documents.codec import document_of
from weft.durable.usage import MAX_ROWS, UsageClient, groups_of, moment_of
from weft.kernel.names import MAX_NAME_CHARS, MAX_TENANT_CHARS, require_token

SURFACE = "usage"
USAGE_PARAMETERS = ("by", "since", "until", "model", "limit")
ALL_USAGE_PARAMETERS = (*USAGE_PARAMETERS, "tenant")


Usage = Annotated[UsageClient, collaborator(UsageClient)]


async def get_usage(deps: Gateway, usage: Usage, request: Request) -> Response:
    """Returns the usage of the caller's tenant: requests by outcome, tokens, accelerator time, remote requests."""
    query = begin_read(request, SURFACE, USAGE_PARAMETERS)
    return await _answer(deps, usage, query, tenant_of(request.scope))


async def get_all_usage(deps: Gateway, usage: Usage, request: Request) -> Response:
    """Returns the usage of all tenants, or of `tenant`: requests by outcome, tokens, accelerator time."""
    query = begin_read(request, SURFACE, ALL_USAGE_PARAMETERS)
    tenant = query.text("tenant")
    return await _answer(deps, usage, query, require_token(tenant, "tenant", MAX_TENANT_CHARS) if tenant else "")


async def _answer(deps: GatewayDeps, usage: UsageClient, query: Query, tenant: str) -> Response:
    now, model = deps.clock.utc_now(), query.text("model")
    wanted = pb.ListUsageRequest(
        by=groups_of(query.text("by"), "by"),
        since=moment_of(query.text("since"), "since", now) if "since" in query else None,
        until=moment_of(query.text("until"), "until", now) if "until" in query else None,
        tenant=tenant,
        model=require_token(model, "model", MAX_NAME_CHARS) if model else "",
        limit=query.count("limit", MAX_ROWS),
    )
    return json_response(document_of(await usage.usage(wanted)))
