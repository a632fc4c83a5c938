"""GET /v1/capabilities, /health and /metrics."""

from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.answer_builder import encode_json
from gateway.errors import envelope, error_headers
from gateway.metrics import CONTENT_TYPE, GatewayMetrics
from gateway.request_facts import facts_of
from gateway.runner_api.capabilities import Verdict, verdict_of
from gateway.runner_api.deps import RunnerApiDeps
from gateway.runner_api.ports import ModelStage, RunnerStage
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

_METHODS = ("GET", "HEAD")
_HEALTH_REASONS = {
    "gpu_out_of_memory": Reason.OUT_OF_MEMORY,
    "all_models_failed": Reason.BACKEND_NOT_READY,
    "queue_saturated": Reason.QUEUE_FULL,
}
START_RETRY_SECONDS = 2.0


async def get_capabilities(deps: RunnerApiDeps, request: Request) -> Response:
    """What this runner can do and how it is; at most 5 s old. 503 while it starts or stops."""
    facts_of(request.scope).surface = "capabilities"
    stage = deps.runner.facts().stage
    if stage is RunnerStage.STARTING:
        raise WeftError(Reason.SERVICE_UNAVAILABLE, "the runner is starting", retry_after_seconds=START_RETRY_SECONDS)
    if stage is RunnerStage.STOPPING:
        raise WeftError(Reason.SHUTTING_DOWN, "the runner is shutting down", retry_after_seconds=START_RETRY_SECONDS)
    return Response(deps.cache.body(), media_type="application/json", headers={"cache-control": "max-age=5"})


async def get_health(deps: RunnerApiDeps, request: Request) -> Response:
    """200 while the runner can be of use; 503 with the reason when it is out of memory, failed or full."""
    request_facts = facts_of(request.scope)
    request_facts.surface = "health"
    facts = deps.runner.facts()
    waiting = deps.queue.load[0]
    verdict = verdict_of(facts, waiting, deps.config.max_queue_depth)
    body: dict[str, object] = {
        "status": verdict.status,
        "uptime": int(deps.inference.clock.monotonic() - deps.started),
        "modelsLoaded": sum(model.stage is ModelStage.LOADED for model in facts.models),
        "queueDepth": waiting,
    }
    if not verdict.is_unhealthy:
        return Response(encode_json(body), media_type="application/json")
    request_facts.error = _unhealthy(verdict)
    return _unhealthy_response(body | {"reason": verdict.reason}, request_facts.error, request_facts.request_id)


async def get_metrics(metrics: GatewayMetrics, request: Request) -> Response:
    """The runner's metrics in the Prometheus text format."""
    facts_of(request.scope).surface = "metrics"
    return Response(metrics.render(), media_type=CONTENT_TYPE)


def _unhealthy(verdict: Verdict) -> WeftError:
    return WeftError(_HEALTH_REASONS[verdict.reason], verdict.message)


def _unhealthy_response(fields: dict[str, object], error: WeftError, request_id: str) -> Response:
    # The figures come first, for probes; then the error envelope, as on every other failure.
    body = encode_json(fields)[:-1] + b"," + envelope(error, request_id)[1:]
    response = Response(body, status_code=503)
    response.raw_headers = error_headers(error, body)
    return response
