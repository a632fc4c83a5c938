"""Usage of the caller's tenant (`/v1/usage`) and of all tenants (`/v1/admin/usage`)."""

from typing import Annotated

from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.unary import json_response
from gateway.deps import Gateway, GatewayDeps
from gateway.intake.headers import tenant_of
from gateway.intake.query import Query, begin_read
from gateway.request_facts import facts_of
from gateway.routing import collaborator
from weft.api.common.v1.usage_pb2 import Usage
from weft.api.registry.v1.model_pb2 import ModelPrice
from weft.api.router.v1 import usage_service_pb2 as pb
from weft.api.router.v1.usage_pb2 import UsageCounts
from weft.dispatch.fleet import FleetView
from weft.dispatch.prices import cheapest, known_price, price_of
from weft.documents.codec import document_of
from weft.durable.usage import MAX_ROWS, UsageClient, groups_of, moment_of
from weft.kernel.access.principal import VIEW_MODELS, Principal
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.values.names import MAX_NAME_CHARS, MAX_TENANT_CHARS, require_token

SURFACE = "usage"
USAGE_PARAMETERS = ("by", "since", "until", "model", "limit", "compareWith")
ALL_USAGE_PARAMETERS = (*USAGE_PARAMETERS, "tenant")


UsageStore = Annotated[UsageClient, collaborator(UsageClient)]


async def get_usage(deps: Gateway, usage: UsageStore, request: Request) -> Response:
    """Returns the usage of the caller's tenant: requests by outcome, tokens, accelerator time, remote requests, price.

    Savings are what the tokens of other requests would have cost at the remote model `compareWith`; by default the
    cheapest one of the mesh whose price is known.
    """
    query = begin_read(request, SURFACE, USAGE_PARAMETERS)
    return await _answer(deps, usage, query, request, tenant_of(request.scope))


async def get_all_usage(deps: Gateway, usage: UsageStore, request: Request) -> Response:
    """Returns the usage of all tenants, or of `tenant`, as `GET /v1/usage` does."""
    query = begin_read(request, SURFACE, ALL_USAGE_PARAMETERS)
    tenant = query.text("tenant")
    tenant = require_token(tenant, "tenant", MAX_TENANT_CHARS) if tenant else ""
    return await _answer(deps, usage, query, request, tenant)


async def _answer(deps: GatewayDeps, usage: UsageClient, query: Query, request: Request, tenant: str) -> Response:
    now, model = deps.clock.utc_now(), query.text("model")
    wanted = pb.ListUsageRequest(
        by=groups_of(query.text("by"), "by"),
        since=moment_of(query.text("since"), "since", now) if "since" in query else None,
        until=moment_of(query.text("until"), "until", now) if "until" in query else None,
        tenant=tenant,
        model=require_token(model, "model", MAX_NAME_CHARS) if model else "",
        limit=query.count("limit", MAX_ROWS),
    )
    reference = _reference(deps.fleet.view, facts_of(request.scope).principal, query.text("compareWith"))
    found = await usage.usage(wanted)
    if (price := known_price(deps.fleet.view, reference)) is not None:
        found.compared_with, found.saved_nanodollars = reference, _saved(price, found.total)
        for row in found.rows:
            row.saved_nanodollars = _saved(price, row.counts)
    return json_response(document_of(found))


def _reference(view: FleetView, principal: Principal, name: str) -> str:
    """Returns the model to compare with; empty: no price is known. Raises INVALID_ARGUMENT for one without a price."""
    visible = [each for each in view.models if principal.may_name(VIEW_MODELS, each)]
    if name and (name not in visible or known_price(view, name) is None):
        raise invalid_field("compareWith", "must be a remote model of the mesh with a known price")
    return name or cheapest(view, visible)


def _saved(price: ModelPrice, counts: UsageCounts) -> int:
    """Returns what the tokens of other requests would have cost, with as many cached ones as possible."""
    prompt = max(0, counts.prompt_tokens - counts.remote_prompt_tokens)
    tokens = Usage(
        prompt_tokens=prompt,
        cached_prompt_tokens=min(prompt, counts.cached_prompt_tokens),
        completion_tokens=max(0, counts.completion_tokens - counts.remote_completion_tokens),
    )
    return price_of(price, tokens)
