"""Configuration, ports and collaborators of the HTTP API of one runner. `weft_app.compose` connects the ports."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from gateway.auth.authentication import KeyRingSource
from gateway.deps import InferenceDeps
from gateway.gateway_config import GatewayConfig
from gateway.operation_client import OperationsClient
from gateway.routing import collaborator
from gateway.runner_api.facts import KeptDevices, RunnerPort
from gateway.runner_api.runner_api_metrics import QueueView, RequestObserver
from weft.dispatch.call import RequestDispatcher
from weft.dispatch.fleet import FleetSource
from weft.durable.journal_policy import JournalRules
from weft.extension import Extension
from weft.kernel.services.health import HealthSource
from weft.kernel.telemetry.tracing import NO_TRACING, Tracing


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerApiConfig:
    """Configuration of the HTTP API of one runner."""

    edge: GatewayConfig = field(default_factory=GatewayConfig)
    """The HTTP part: port, limits, requests per tenant."""
    max_queue_depth: int = 16
    """Requests that may wait, over all models."""
    metrics: bool = True
    """Whether `/metrics` is served."""
    metrics_port: int | None = None
    """An additional port with /metrics alone; 0: any free one."""
    journal_rules: JournalRules = field(default_factory=JournalRules)
    """Journal modes of tenants. A single runner cannot journal requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerApiPorts:
    """Services that the API of one runner calls. Dispatcher, fleet and queue know only this runner."""

    runner: RunnerPort
    dispatcher: RequestDispatcher
    fleet: FleetSource
    queue: QueueView
    operations: OperationsClient
    keys: KeyRingSource | None = None
    """The valid API keys; None: callers need none."""
    health: HealthSource = HealthSource()  # noqa: RUF009 - it has no state
    """The health of the process."""
    tracing: Tracing = NO_TRACING
    """Receives the spans of requests."""
    extensions: Sequence[Extension] = ()
    """Whose APIs of runners are served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerApiDeps:
    """Collaborators of the endpoints of one runner."""

    config: RunnerApiConfig
    inference: InferenceDeps
    runner: RunnerPort
    operations: OperationsClient
    observer: RequestObserver
    devices: KeptDevices
    started: float
    """When the process started, on the monotonic clock."""
    extensions: Sequence[Extension] = ()


RunnerApi = Annotated[RunnerApiDeps, collaborator(RunnerApiDeps)]
