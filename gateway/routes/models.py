"""GET /v1/models, /v1/models/{model}, /v1/models/agent/{agent} and /v1/models/route/{route}."""

from fastapi import FastAPI, Request, Response

from gateway.facts import facts_of
from gateway.parts import InferenceParts
from gateway.translate.models import model_entry, model_list
from gateway.translate.sse import encode_json
from weft.dispatch.agents import AGENT_PREFIX, ROUTE_PREFIX
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


def add_models(app: FastAPI, parts: InferenceParts) -> None:
    """Add the routes."""

    async def list_models(request: Request) -> Response:
        """Every model, pool, agent and route that can be asked now; one that sleeps wakes when it is asked."""
        facts_of(request.scope).surface = "models"
        return Response(encode_json(model_list(parts.fleet.view)), media_type="application/json")

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
        facts_of(request.scope).surface = "models"
        entry = model_entry(parts.fleet.view, name)
        if entry is None:
            raise WeftError(Reason.MODEL_NOT_FOUND, f"no {noun} of this name can be asked now")
        return Response(encode_json(entry), media_type="application/json")

    app.add_api_route("/v1/models", list_models, methods=["GET"], tags=["openai"])
    app.add_api_route("/v1/models/{model}", get_model, methods=["GET"], tags=["openai"])
    app.add_api_route("/v1/models/agent/{agent}", get_agent, methods=["GET"], tags=["openai"])
    app.add_api_route("/v1/models/route/{route}", get_route, methods=["GET"], tags=["openai"])
