"""GET and HEAD /health, /livez, /readyz, /metrics and /ca.pem."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from gateway.deps import Gateway, Inference, InferenceDeps
from gateway.errors import envelope, error_headers
from gateway.request_facts import facts_of
from gateway.routing import ApiRouter
from weft.dispatch.fleet import FleetView
from weft.kernel.access.principal import VIEW_TELEMETRY
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.services.health import LIVEZ, READYZ, probe_answer
from weft.kernel.text.json_lines import encode_json

MAX_AUTHORITY_BYTES = 65_536


async def get_health(deps: Gateway, request: Request) -> Response:
    """Answers 200 if a router is reachable and a model is active or can be woken; otherwise 503 with the reason."""
    facts = facts_of(request.scope)
    facts.surface = "health"
    has_router = deps.router is None or deps.router.is_reachable
    status = health_status(deps.fleet.view, has_router=has_router)
    fields = {"status": status} | component_fields(deps, request)
    if status == "ok":
        return Response(encode_json(fields), media_type="application/json")
    facts.error = unhealthy(status)
    return unhealthy_response(fields, facts.error, facts.request_id)


def component_fields(deps: InferenceDeps, request: Request) -> dict[str, object]:
    """Returns the components of this process if the caller may see its telemetry, otherwise nothing."""
    components = deps.health.component_documents()
    if not components or not deps.gate.allows(request.scope, VIEW_TELEMETRY):
        return {}
    report = deps.health.report
    return {"live": report.is_live, "ready": report.is_ready, "components": components}


async def get_livez(deps: Inference, request: Request) -> Response:
    """Answers 200 unless this process is stuck; other components are not considered."""
    return _probe_response(deps, request, LIVEZ)


async def get_readyz(deps: Inference, request: Request) -> Response:
    """Answers 200 if this process accepts requests, even if it is degraded; otherwise 503."""
    return _probe_response(deps, request, READYZ)


def _probe_response(deps: InferenceDeps, request: Request, path: str) -> Response:
    facts = facts_of(request.scope)
    facts.surface = "health"
    is_healthy, document = probe_answer(path, deps.health)
    if is_healthy:
        return Response(encode_json(document), media_type="application/json")
    words = str(document["status"]).replace("_", " ")
    facts.error = WeftError(Reason.SERVICE_UNAVAILABLE, f"the process is {words}")
    return unhealthy_response(document, facts.error, facts.request_id)


async def get_metrics(deps: Inference, request: Request) -> Response:
    """Returns the metrics of this process as Prometheus text or OpenMetrics."""
    facts_of(request.scope).surface = "metrics"
    rendered = await deps.metrics.page.render(request.headers.get("accept", ""))
    return Response(rendered.body, headers={"content-type": rendered.content_type})


async def get_authority(deps: Gateway, request: Request) -> Response:
    """Returns the certificate of the authority that clients should trust. It is public."""
    facts_of(request.scope).surface = "authority"
    file = deps.config.tls.authority_file
    if file is None:
        raise WeftError(Reason.NOT_FOUND, "this gateway has no authority; the system's trust is enough")
    try:
        content = await asyncio.to_thread(_read_limited, file.expanduser())
    except OSError as error:
        raise WeftError(Reason.INTERNAL, "the certificate of the authority cannot be read") from error
    return Response(content, media_type="application/x-pem-file")


def _read_limited(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(MAX_AUTHORITY_BYTES)


def health_status(view: FleetView, *, has_router: bool = True) -> str:
    """Returns `ok`, `starting` before the fleet is known, `no_router` or `no_active_model`."""
    if view.revision == 0:
        return "starting"
    if not has_router:
        return "no_router"
    usable = any(model.active or model.hibernating for model in view.models.values())
    return "ok" if usable else "no_active_model"


def unhealthy(status: str) -> WeftError:
    """Returns the error of a status other than `ok`."""
    if status == "starting":
        return WeftError(Reason.SERVICE_UNAVAILABLE, "the gateway does not know the mesh yet")
    if status == "no_router":
        return WeftError(
            Reason.SERVICE_UNAVAILABLE, "no router is reachable; requests wait for one until their deadline"
        )
    return WeftError(Reason.NO_RUNNER_AVAILABLE, "no model is active")


def unhealthy_response(fields: Mapping[str, object], error: WeftError, request_id: str) -> Response:
    """Returns the answer of a failed health check: `fields` for probes, then the error envelope."""
    body = encode_json(fields)[:-1] + b"," + envelope(error, request_id)[1:]
    response = Response(body, status_code=error.traits.http_status)
    response.raw_headers = error_headers(error, body)
    return response


HEALTH = ApiRouter("operations")
HEALTH.add_get("/health", None, get_health, name="health", with_head=True)
# The path that many probes use by default.
HEALTH.add_get("/healthz", None, get_livez, name="healthz", with_head=True)
HEALTH.add_get("/ca.pem", None, get_authority, name="authority", with_head=True)
PROBES = ApiRouter("operations")
PROBES.add_get("/livez", None, get_livez, with_head=True)
PROBES.add_get("/readyz", None, get_readyz, with_head=True)
METRICS = ApiRouter("operations")
METRICS.add_get(
    "/metrics", VIEW_TELEMETRY, get_metrics, name="metrics", with_head=True, response_class=PlainTextResponse
)
