"""The ASGI application: FastAPI with our own layer around it."""

from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from gateway.admin.keys import add_keys
from gateway.admin.requests import add_requests
from gateway.admin.routes_models import add_admin_models
from gateway.admin.routes_operations import add_admin_operations
from gateway.anthropic.messages import add_messages
from gateway.auth.authentication import KeyGate, OpenGate
from gateway.auth.rate_limits import TenantRateLimits
from gateway.batches.endpoints import add_batches
from gateway.batches.files import add_files
from gateway.batches.finishing import FinishingJobs
from gateway.batches.parts import batch_parts, file_parts
from gateway.config import GatewayConfig
from gateway.endpoints import PUBLISHED
from gateway.errors import EdgeError
from gateway.health import add_health
from gateway.http.event_watches import EventWatches
from gateway.media.fetcher import media_source
from gateway.metrics import GatewayMetrics
from gateway.middleware import EdgeMiddleware
from gateway.openai.chat import add_chat
from gateway.openai.completions import add_completions
from gateway.openai.embeddings import add_embeddings
from gateway.openai.model_calls import add_model_calls
from gateway.openai.models import add_models
from gateway.openapi import publish_schemas
from gateway.parts import GatewayParts, InferenceParts
from gateway.ports import GatewayPorts
from gateway.resources.declarations import add_declarations
from gateway.resources.endpoints import add_events, add_resources, add_settings
from gateway.responses.create import add_responses, responses_parts
from gateway.responses.retrieve import add_kept_responses
from gateway.routing import ShortcutApp, publish_static_routes
from gateway.tasks.dispatcher import BoundedTasks, JournalingDispatcher
from gateway.tasks.endpoints import add_tasks
from gateway.tasks.surfaces import surfaces_of
from weft.kernel.clock import Clock, SystemClock
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

if TYPE_CHECKING:
    from fastapi.telemetry import TelemetryConfig

NO_TELEMETRY: "TelemetryConfig" = {"auto_configure": False, "tracing": False, "metrics": False, "logs": False}
"""Of the framework's own: it would send URLs of callers wherever a variable of the environment says."""


def create_app(
    config: GatewayConfig,
    ports: GatewayPorts,
    *,
    watches: EventWatches | None = None,
    finishing: FinishingJobs | None = None,
    metrics: GatewayMetrics | None = None,
    clock: Clock | None = None,
) -> ShortcutApp:
    """The application of one gateway. It holds no state but its metrics."""
    ticking = clock or SystemClock()
    tasks = None if ports.tasks is None else BoundedTasks(ports.tasks, timeout_seconds=config.task_timeout_seconds)
    parts = GatewayParts(
        config=config,
        dispatcher=ports.dispatcher if tasks is None else JournalingDispatcher(ports.dispatcher, tasks, ticking),
        can_journal=tasks is not None,
        fleet=ports.fleet,
        registry=ports.registry,
        router=ports.router,
        watches=watches or EventWatches(config.max_event_watches),
        metrics=metrics or GatewayMetrics(),
        clock=ticking,
        media=ports.media or media_source(config.media, ticking),
        gate=OpenGate() if ports.keys is None else KeyGate(ports.keys, ticking),
        rate_limits=None if config.rate_limits is None else TenantRateLimits(config.rate_limits, ticking),
    )
    app = bare_app("weft gateway", parts)
    add_openai(app, parts)
    add_messages(app, parts)
    responses = responses_parts(parts, ports.responses, tasks)
    add_responses(app, parts, responses)
    add_kept_responses(app, parts, responses)
    for add_routes in (add_resources, add_declarations, add_settings, add_events, add_health):
        add_routes(app, parts)
    _add_what_there_is(app, parts, ports)
    if tasks is not None:
        add_tasks(app, parts, tasks, surfaces_of(parts))
    _add_files_and_batches(app, parts, ports, finishing or FinishingJobs(config.batches.max_finishing))
    publish_static_routes(app)
    publish_schemas(app, PUBLISHED)
    return app


def bare_app(title: str, parts: InferenceParts) -> ShortcutApp:
    """An application without routes, with our own layer around it."""
    layer = partial(EdgeMiddleware, config=parts.config, metrics=parts.metrics, clock=parts.clock, gate=parts.gate)
    # Interactive documentation would load its code from elsewhere; a redirect would be an answer without an envelope.
    app = ShortcutApp(
        layer,
        title=title,
        version=version("weft"),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry=NO_TELEMETRY,
    )
    app.add_middleware(layer)
    app.add_exception_handler(HTTPException, _raise_as_weft_error)
    app.add_exception_handler(RequestValidationError, _raise_as_weft_error)
    return app


def add_openai(app: FastAPI, parts: InferenceParts) -> None:
    """Add the routes of OpenAI's API."""
    for add_routes in (add_chat, add_completions, add_embeddings, add_model_calls, add_models):
        add_routes(app, parts)


def _add_what_there_is(app: FastAPI, parts: GatewayParts, ports: GatewayPorts) -> None:
    if ports.admin is not None:
        add_admin_models(app, parts, ports.admin)
        add_admin_operations(app, parts, ports.admin)
    if ports.keys is not None and ports.api_keys is not None:
        add_keys(app, parts, ports.api_keys)
    if ports.requests is not None:
        add_requests(app, ports.requests)


def _add_files_and_batches(app: FastAPI, parts: GatewayParts, ports: GatewayPorts, finishing: FinishingJobs) -> None:
    if ports.files is None:
        return
    add_files(app, parts, file_parts(parts, ports.files))
    if ports.batches is not None:
        add_batches(app, parts, batch_parts(parts, ports.files, ports.batches, surfaces_of(parts), finishing))


async def _raise_as_weft_error(request: Request, error: Exception) -> Response:
    """What the framework itself refuses, in our words; `EdgeMiddleware` answers it."""
    if isinstance(error, HTTPException):
        if error.status_code == 404:
            raise WeftError(Reason.NOT_FOUND, "there is nothing at this path")
        if error.status_code == 405:
            allow = (b"allow", _allowed_methods(request).encode())
            message = f"{request.method} is not allowed at this path"
            raise EdgeError(405, Reason.METHOD_NOT_ALLOWED, message, headers=(allow,))
        raise EdgeError(error.status_code, Reason.MALFORMED_REQUEST, "the request was refused")
    raise WeftError(Reason.INVALID_ARGUMENT, "the request has a wrong parameter")


def _allowed_methods(request: Request) -> str:
    """The methods that the path has. The framework names those of one route, and a path has one route per method."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    fitting = [route for route in routes if route.matches(request.scope)[0] is Match.PARTIAL]
    return ", ".join(sorted({method for route in fitting for method in route.methods or ()}))
