"""GET /v1/capabilities, /health and /metrics, and the collaborators of all endpoints of a runner."""

from dataclasses import dataclass, field
from typing import Annotated

from starlette.requests import Request
from starlette.responses import Response

from gateway import health as gateway_health
from gateway.answers.answer_builder import encode_json
from gateway.config import GatewayConfig
from gateway.deps import InferenceDeps
from gateway.health import component_fields, metrics_response, unhealthy_response
from gateway.operations import OperationsPort
from gateway.request_facts import facts_of
from gateway.routing import collaborator
from gateway.runner_api.capabilities import CapabilityCache, QueueFacts, Verdict, verdict_of
from gateway.runner_api.metrics import RequestObserver
from gateway.runner_api.ports import ModelStage, QueueView, RunnerPort, RunnerStage
from weft.durable.journal_policy import JournalRules
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerApiConfig:
    """Configuration of the HTTP API of one runner."""

    edge: GatewayConfig = field(default_factory=GatewayConfig)
    """The HTTP part: port, limits, requests per tenant."""
    max_queue_depth: int = 16
    """Requests that may wait, over all models."""
    metrics: bool = True
    """Whether /metrics is served."""
    metrics_port: int | None = None
    """An additional port with /metrics alone; 0: any free one."""
    journal_rules: JournalRules = field(default_factory=JournalRules)
    """The modes of tenants whose requests must be journaled, which a runner alone cannot do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerApiDeps:
    """Collaborators of the endpoints of one runner."""

    config: RunnerApiConfig
    inference: InferenceDeps
    runner: RunnerPort
    operations: OperationsPort
    queue: QueueView
    observer: RequestObserver
    cache: CapabilityCache
    started: float
    """When the process started, on the monotonic clock."""

    def queue_facts(self) -> QueueFacts:
        """Returns the queue's depth, limit and waits."""
        return queue_facts(self.config, self.queue, self.observer)


RunnerApi = Annotated[RunnerApiDeps, collaborator(RunnerApiDeps)]


def queue_facts(config: RunnerApiConfig, queue: QueueView, observer: RequestObserver) -> QueueFacts:
    """Returns the queue's depth, limit and waits."""
    return QueueFacts(
        depth=queue.load[0],
        max_depth=config.max_queue_depth,
        average_wait_ms=observer.waits.average_ms(),
        p95_wait_ms=observer.waits.p95_ms(),
    )


_HEALTH_REASONS = {
    "gpu_out_of_memory": Reason.OUT_OF_MEMORY,
    "all_models_failed": Reason.BACKEND_NOT_READY,
    "queue_saturated": Reason.QUEUE_FULL,
}
START_RETRY_SECONDS = 2.0


async def get_capabilities(deps: RunnerApi, request: Request) -> Response:
    """Returns the capabilities and the state of the runner, at most 5 s old. 503 while it starts or stops."""
    facts_of(request.scope).surface = "capabilities"
    stage = deps.runner.facts().stage
    if stage is RunnerStage.STARTING:
        raise WeftError(Reason.SERVICE_UNAVAILABLE, "the runner is starting", retry_after_seconds=START_RETRY_SECONDS)
    if stage is RunnerStage.STOPPING:
        raise WeftError(Reason.SHUTTING_DOWN, "the runner is shutting down", retry_after_seconds=START_RETRY_SECONDS)
    return Response(deps.cache.body(), media_type="application/json", headers={"cache-control": "max-age=5"})


async def get_health(deps: RunnerApi, request: Request) -> Response:
    """Answers 200 while the runner is usable; 503 with the reason when it is out of memory, failed or full."""
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
        **component_fields(deps.inference, request),
    }
    if not verdict.is_unhealthy:
        return Response(encode_json(body), media_type="application/json")
    request_facts.error = _unhealthy(verdict)
    return unhealthy_response(body | {"reason": verdict.reason}, request_facts.error, request_facts.request_id)


async def get_livez(deps: RunnerApi, request: Request) -> Response:
    """Answers 200 unless the runner's process itself is stuck; engines do not count."""
    return await gateway_health.get_livez(deps.inference, request)


async def get_readyz(deps: RunnerApi, request: Request) -> Response:
    """Answers 200 once the runner takes requests, also without a ready engine; else 503."""
    return await gateway_health.get_readyz(deps.inference, request)


async def get_metrics(deps: RunnerApi, request: Request) -> Response:
    """Returns the runner's metrics, as Prometheus text or as OpenMetrics."""
    return await metrics_response(deps.inference.metrics.page, request)


def _unhealthy(verdict: Verdict) -> WeftError:
    return WeftError(_HEALTH_REASONS[verdict.reason], verdict.message)
