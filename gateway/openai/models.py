"""GET and HEAD /v1/models, /v1/models/{model}, /v1/models/agent/{agent} and /v1/models/route/{route}.

Clients of Anthropic's API, who name its version in a header, get its shapes.
"""

from fastapi import FastAPI, Request, Response

from gateway.answers.sse import encode_json
from gateway.dialect import Dialect
from gateway.openai.model_entries import anthropic_entry, anthropic_list, model_entry, model_list
from gateway.parts import InferenceParts
from gateway.request_facts import facts_of
from weft.dispatch.agents import AGENT_PREFIX, ROUTE_PREFIX
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason

MAX_LISTED = 1000
"""Models of one page, for Anthropic's clients."""
DEFAULT_LISTED = 20
_MAX_DIGITS = 4
_METHODS = ("GET", "HEAD")


def add_models(app: FastAPI, parts: InferenceParts) -> None:
    """Add the routes."""

    async def list_models(request: Request) -> Response:
        """Every model, pool, agent and route that can be asked now; one that sleeps wakes when it is asked."""
        facts = facts_of(request.scope)
        facts.surface = "models"
        view = parts.fleet.view
        found = _page(request, model_list(view)) if facts.dialect is Dialect.ANTHROPIC else model_list(view)
        return _json(found)

    async def get_model(request: Request) -> Response:
        """One model or pool."""
        return answer_for(request, request.path_params["model"], "model or pool")

    async def get_agent(request: Request) -> Response:
        """One agent, as a model."""
        return answer_for(request, AGENT_PREFIX + request.path_params["agent"], "agent")

    async def get_route(request: Request) -> Response:
        """One route, as a model."""
        return answer_for(request, ROUTE_PREFIX + request.path_params["route"], "route")

    def answer_for(request: Request, name: str, noun: str) -> Response:
        facts = facts_of(request.scope)
        facts.surface = "models"
        entry = model_entry(parts.fleet.view, name)
        if entry is None:
            raise WeftError(Reason.MODEL_NOT_FOUND, f"no {noun} of this name can be asked now")
        return _json(anthropic_entry(entry) if facts.dialect is Dialect.ANTHROPIC else entry)

    for path, endpoint in (
        ("/v1/models", list_models),
        ("/v1/models/{model}", get_model),
        ("/v1/models/agent/{agent}", get_agent),
        ("/v1/models/route/{route}", get_route),
    ):
        for method in _METHODS:
            app.add_api_route(path, endpoint, methods=[method], tags=["openai"], include_in_schema=method == "GET")


def _page(request: Request, listed: dict[str, object]) -> dict[str, object]:
    """The page of the list that is asked for. Other parameters than these are accepted and not used."""
    given = request.query_params
    limit, after, before = given.get("limit"), given.get("after_id"), given.get("before_id")
    if after and before:
        raise invalid_field("before_id", "must not be given together with 'after_id'")
    count = DEFAULT_LISTED
    if limit is not None:
        count = int(limit) if limit.isascii() and limit.isdigit() and len(limit) <= _MAX_DIGITS else 0
    if not 1 <= count <= MAX_LISTED:
        raise invalid_field("limit", f"must be a whole number from 1 to {MAX_LISTED}")
    return anthropic_list(listed, count, after_id=after or "", before_id=before or "")


def _json(document: dict[str, object]) -> Response:
    return Response(encode_json(document), media_type="application/json")
