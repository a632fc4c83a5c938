"""Configuration and collaborators of the runner API."""

from dataclasses import dataclass, field

from gateway.config import GatewayConfig
from gateway.deps import InferenceDeps
from gateway.runner_api.capabilities import CapabilityCache, QueueFacts
from gateway.runner_api.observed import RequestObserver
from gateway.runner_api.ports import OperationsPort, QueueView, RunnerPort


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerApiConfig:
    """Configuration of the HTTP API of one runner."""

    edge: GatewayConfig = field(default_factory=GatewayConfig)
    """The HTTP part: port, limits, requests per tenant."""
    max_queue_depth: int = 16
    """Requests that may wait, over all models."""
    metrics: bool = True
    """Whether there is /metrics."""
    metrics_port: int | None = None
    """An additional port with /metrics alone; 0: any free one."""


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


def queue_facts(config: RunnerApiConfig, queue: QueueView, observer: RequestObserver) -> QueueFacts:
    """Returns the queue's depth, limit and waits."""
    return QueueFacts(
        depth=queue.load[0],
        max_depth=config.max_queue_depth,
        average_wait_ms=observer.waits.average_ms(),
        p95_wait_ms=observer.waits.p95_ms(),
    )
