"""What the routes of the runner API share."""

from dataclasses import dataclass, field

from gateway.config import GatewayConfig
from gateway.deps import InferenceDeps
from gateway.runner_api.capabilities import CapabilityCache, QueueFacts
from gateway.runner_api.observed import RequestObserver
from gateway.runner_api.ports import OperationsPort, QueueView, RunnerPort


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerApiConfig:
    """How the surface of one runner is set up."""

    edge: GatewayConfig = field(default_factory=GatewayConfig)
    """The HTTP part: port, limits, requests per tenant."""
    max_queue_depth: int = 16
    """Requests that may wait, over all models."""
    metrics: bool = True
    """Whether there is /metrics."""
    metrics_port: int | None = None
    """A port on which there is nothing but /metrics, besides; 0: any free one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerApiDeps:
    """One surface's collaborators."""

    config: RunnerApiConfig
    inference: InferenceDeps
    runner: RunnerPort
    operations: OperationsPort
    queue: QueueView
    observer: RequestObserver
    cache: CapabilityCache
    started: float
    """When the process came up, on the monotonic clock."""

    def queue_facts(self) -> QueueFacts:
        """The queue right now."""
        return queue_facts(self.config, self.queue, self.observer)


def queue_facts(config: RunnerApiConfig, queue: QueueView, observer: RequestObserver) -> QueueFacts:
    """The queue right now."""
    return QueueFacts(
        depth=queue.load[0],
        max_depth=config.max_queue_depth,
        average_wait_ms=observer.waits.average_ms(),
        p95_wait_ms=observer.waits.p95_ms(),
    )
