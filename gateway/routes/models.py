"""GET /v1/models and /v1/models/{model}."""

from fastapi import FastAPI, Request, Response

from gateway.facts import facts_of
from gateway.parts import GatewayParts
from gateway.translate.models import model_entry, model_list
from gateway.translate.sse import encode_json
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


def add_models(app: FastAPI, parts: GatewayParts) -> None:
    """Add the routes."""

    async def list_models(request: Request) -> Response:
        """Every model and pool that can be asked now."""
        facts_of(request.scope).surface = "models"
        return Response(encode_json(model_list(parts.fleet.view)), media_type="application/json")

    async def get_model(request: Request) -> Response:
        """One model or pool."""
        facts_of(request.scope).surface = "models"
        entry = model_entry(parts.fleet.view, request.path_params["model"])
        if entry is None:
            raise WeftError(Reason.MODEL_NOT_FOUND, "no model or pool of this name can be asked now")
        return Response(encode_json(entry), media_type="application/json")

    app.add_api_route("/v1/models", list_models, methods=["GET"], tags=["openai"])
    app.add_api_route("/v1/models/{model}", get_model, methods=["GET"], tags=["openai"])
