"""The runner API as a service that `weft_app.compose` composes beside a runner, and its ASGI application."""

from collections.abc import Sequence

import grpc

from gateway.app import bare_app, gate_of
from gateway.auth.rate_limits import TenantRateLimits
from gateway.deps import InferenceDeps
from gateway.endpoints import DOCUMENT, RUNNER_ROUTERS
from gateway.http.server import AppServer
from gateway.metrics import GatewayMetrics
from gateway.openai.endpoints import OPENAI
from gateway.routing import EdgeApp
from gateway.runner_api.capabilities import CapabilityCache
from gateway.runner_api.endpoints import RUNNER_METRICS, RUNNER_OPERATIONS, RUNNER_STATE
from gateway.runner_api.metrics import RequestObserver, RunnerMetrics, StateCollector
from gateway.runner_api.ports import RunnerApiPorts
from gateway.runner_api.state import RunnerApiConfig, RunnerApiDeps, queue_facts
from weft.dispatch.call import LayeredDispatcher
from weft.durable.journal_policy import JournalPolicy
from weft.kernel.clock import Clock, SystemClock
from weft.kernel.metrics import MetricsPage
from weft.kernel.tracing import ServiceName


def build(
    config: RunnerApiConfig, ports: RunnerApiPorts, *, metrics: MetricsPage | None = None, clock: Clock | None = None
) -> "RunnerApiService":
    """Returns the HTTP API of a runner, not started. `metrics` receives its metrics; by default it has its own page."""
    ticking = clock or SystemClock()
    queue, fleet, runner = ports.queue, ports.fleet, ports.runner
    page = MetricsPage() if metrics is None else metrics
    edge_metrics = GatewayMetrics(page)
    limits = config.edge.rate_limits
    runner_metrics = RunnerMetrics(page, () if limits is None else limits.tenants)
    observer = RequestObserver(
        queue=queue,
        max_queue_depth=config.max_queue_depth,
        metrics=runner_metrics,
        model_label=lambda name: edge_metrics.model_label(name, fleet.view),
        clock=ticking,
    )
    inference = InferenceDeps(
        config=config.edge,
        dispatcher=LayeredDispatcher(ports.dispatcher, observer.around),
        fleet=fleet,
        journal_policy=JournalPolicy(fleet, config.journal_rules, is_possible=False),
        metrics=edge_metrics,
        clock=ticking,
        gate=gate_of(ports.keys, ticking),
        rate_limits=None if limits is None else TenantRateLimits(limits, ticking),
        tracing=ports.tracing,
        service=ServiceName.RUNNER,
        health=ports.health,
        on_limited=runner_metrics.limited,
    )
    cache = CapabilityCache(runner, lambda: queue_facts(config, queue, observer), ticking)
    page.register(StateCollector(devices=lambda: cache.devices, load=lambda: queue.load))
    deps = RunnerApiDeps(
        config=config,
        inference=inference,
        runner=runner,
        operations=ports.operations,
        queue=queue,
        observer=observer,
        cache=cache,
        started=ticking.monotonic(),
    )
    return RunnerApiService(deps)


def create_app(deps: RunnerApiDeps) -> EdgeApp:
    """Returns the application of one runner."""
    app = bare_app("weft runner", deps.inference, RUNNER_ROUTERS)
    # Before the models, whose names may have slashes.
    app.serve(RUNNER_OPERATIONS, {RunnerApiDeps: deps})
    app.serve(OPENAI, {InferenceDeps: deps.inference})
    app.serve(RUNNER_STATE)
    if deps.config.metrics:
        app.serve(RUNNER_METRICS)
    app.serve(DOCUMENT)
    return app


class RunnerApiService:
    """Satisfies `weft.kernel.service.Service`; it serves HTTP, so it registers nothing on a gRPC server."""

    service_names: Sequence[str] = ()

    def __init__(self, deps: RunnerApiDeps) -> None:
        edge, metrics = deps.config.edge, deps.inference.metrics
        self._cache = deps.cache
        self._server = AppServer(
            create_app(deps),
            exposure=edge.exposure(),
            limits=edge.connections,
            on_refused=metrics.refused,
            name="runner",
            port_option="--http-port",
        )
        self._metrics_server: AppServer | None = None
        if deps.config.metrics and deps.config.metrics_port is not None:
            app = bare_app("weft runner metrics", deps.inference)
            app.serve(RUNNER_METRICS, {RunnerApiDeps: deps})
            self._metrics_server = AppServer(
                app,
                exposure=edge.exposure(deps.config.metrics_port),
                limits=edge.connections,
                on_refused=metrics.refused,
                name="runner metrics",
                port_option="METRICS_PORT",
            )

    @property
    def url(self) -> str:
        """The server's URL, such as `http://127.0.0.1:8081`."""
        return self._server.url

    @property
    def metrics_url(self) -> str:
        """The URL of the additional /metrics port; empty: there is none."""
        return "" if self._metrics_server is None else self._metrics_server.url

    def register(self, server: grpc.aio.Server) -> None:
        """Does nothing: it has no gRPC services."""

    async def start(self) -> None:
        """Bind and accept; while the runner starts, answers are 503. Raises a WeftError if an address is unusable."""
        await self._cache.start()
        for server in self._servers():
            await server.start()

    async def stop(self, grace_seconds: float) -> None:
        """See `weft.kernel.service.Service.stop`."""
        for server in self._servers():
            server.request_stop(grace_seconds)
        for server in self._servers():
            await server.wait_stopped()
        await self._cache.stop()

    def _servers(self) -> list[AppServer]:
        return [self._server, *([self._metrics_server] if self._metrics_server is not None else [])]
