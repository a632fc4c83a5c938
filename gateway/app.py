"""The ASGI application: FastAPI with our own layer around it."""

from importlib.metadata import version

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from gateway.config import GatewayConfig
from gateway.edge import EdgeMiddleware
from gateway.errors import EdgeError
from gateway.event_watches import EventWatches
from gateway.metrics import GatewayMetrics
from gateway.openapi import publish_schemas
from gateway.parts import GatewayParts
from gateway.ports import RegistryPort, RequestDispatcher
from gateway.routes.chat import add_chat
from gateway.routes.completions import add_completions
from gateway.routes.declarations import add_declarations
from gateway.routes.embeddings import add_embeddings
from gateway.routes.events import add_events
from gateway.routes.health import add_health
from gateway.routes.models import add_models
from gateway.routes.resources import add_resources
from weft.dispatch.fleet import FleetSource
from weft.kernel.clock import Clock, SystemClock
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


def create_app(
    config: GatewayConfig,
    *,
    dispatcher: RequestDispatcher,
    fleet: FleetSource,
    registry: RegistryPort,
    watches: EventWatches | None = None,
    metrics: GatewayMetrics | None = None,
    clock: Clock | None = None,
) -> FastAPI:
    """The application of one gateway. It holds no state but its metrics."""
    parts = GatewayParts(
        config=config,
        dispatcher=dispatcher,
        fleet=fleet,
        registry=registry,
        watches=watches or EventWatches(config.max_event_watches),
        metrics=metrics or GatewayMetrics(),
        clock=clock or SystemClock(),
    )
    # Interactive documentation would load its code from elsewhere; a redirect would be an answer without an envelope.
    app = FastAPI(title="weft gateway", version=version("weft"), docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_middleware(EdgeMiddleware, config=config, metrics=parts.metrics, clock=parts.clock)
    app.add_exception_handler(HTTPException, _raise_as_weft_error)
    app.add_exception_handler(RequestValidationError, _raise_as_weft_error)
    openai_routes = (add_chat, add_completions, add_embeddings, add_models)
    for add_routes in (*openai_routes, add_resources, add_declarations, add_events, add_health):
        add_routes(app, parts)
    publish_schemas(app)
    return app


async def _raise_as_weft_error(request: Request, error: Exception) -> Response:
    """What the framework itself refuses, in our words; `EdgeMiddleware` answers it."""
    if isinstance(error, HTTPException):
        if error.status_code == 404:
            raise WeftError(Reason.NOT_FOUND, "there is nothing at this path")
        if error.status_code == 405:
            allow = (b"allow", (error.headers or {}).get("Allow", "").encode())
            message = f"{request.method} is not allowed at this path"
            raise EdgeError(405, Reason.METHOD_NOT_ALLOWED, message, headers=(allow,))
        raise EdgeError(error.status_code, Reason.MALFORMED_REQUEST, "the request was refused")
    raise WeftError(Reason.INVALID_ARGUMENT, "the request has a wrong parameter")
