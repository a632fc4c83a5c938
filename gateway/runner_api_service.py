"""The runner API as a service that `weft_app.compose` starts beside a runner, and its ASGI application."""

from collections.abc import Callable, Iterable
from functools import partial

from gateway.app import bare_app
from gateway.auth.authentication import Gate
from gateway.auth.rate_limits import TenantRateLimits
from gateway.deps import InferenceDeps
from gateway.endpoints import DOCUMENT
from gateway.gateway_health import METRICS, PROBES
from gateway.gateway_metrics import GatewayMetrics
from gateway.http.server import AppServer
from gateway.http_api import HttpApi
from gateway.openai.openai_endpoints import OPENAI
from gateway.routing import ApiRouter, DeferredApi, EdgeApp
from gateway.runner_api.deps import RunnerApiConfig, RunnerApiDeps, RunnerApiPorts
from gateway.runner_api.facts import KeptDevices
from gateway.runner_api.runner_api_endpoints import RUNNER_OPERATIONS, RUNNER_STATE
from gateway.runner_api.runner_api_metrics import RequestObserver, add_state_metrics
from weft.dispatch.call import LayeredDispatcher
from weft.durable.journal_policy import JournalPolicy
from weft.extension import ApiHook, Extension, load_hook
from weft.kernel.services.service_lifecycle import Service
from weft.kernel.telemetry.metrics_page import MetricsPage
from weft.kernel.telemetry.tracing import ServiceName
from weft.kernel.time.clock import Clock, SystemClock

RUNNER_ROUTERS: tuple[ApiRouter, ...] = (RUNNER_OPERATIONS, OPENAI, RUNNER_STATE, PROBES, METRICS, DOCUMENT)
"""The endpoints of each runner's API: its own, and those of the gateway that also apply to one runner."""


def runner_routers(extensions: Iterable[Extension]) -> tuple[ApiRouter, ...]:
    """Returns the endpoints of a runner's API with these extensions. Imports their APIs."""
    return (*RUNNER_ROUTERS, *(load_hook(hook.place, HttpApi).router for hook in _of_runners(extensions)))


def _of_runners(extensions: Iterable[Extension]) -> Iterable[ApiHook]:
    return (hook for extension in extensions for hook in extension.apis if hook.is_of_runners)


def build(
    config: RunnerApiConfig, ports: RunnerApiPorts, *, metrics: MetricsPage | None = None, clock: Clock | None = None
) -> "RunnerApiService":
    """Returns the HTTP API of a runner, not started. `metrics` receives its metrics; None: a separate page."""
    ticking = clock or SystemClock()
    fleet, limits = ports.fleet, config.edge.rate_limits
    edge_metrics = GatewayMetrics(metrics)
    observer = RequestObserver(
        edge_metrics.page,
        queue=ports.queue,
        max_queue_depth=config.max_queue_depth,
        model_label=lambda name: fleet.view.label(name),  # noqa: PLW0108 - by the newest view
        clock=ticking,
        named_tenants=() if limits is None else limits.tenants,
    )
    inference = InferenceDeps(
        config=config.edge,
        dispatcher=LayeredDispatcher(ports.dispatcher, observer.around),
        fleet=fleet,
        journal_policy=JournalPolicy(fleet, config.journal_rules, is_possible=False),
        metrics=edge_metrics,
        clock=ticking,
        gate=Gate(ports.keys, ticking, is_behind_proxy=config.edge.is_behind_proxy),
        rate_limits=None if limits is None else TenantRateLimits(limits, ticking),
        tracing=ports.tracing,
        service=ServiceName.RUNNER,
        health=ports.health,
        on_limited=observer.limited,
    )
    devices = KeptDevices(ports.runner, ticking)
    add_state_metrics(edge_metrics.page, ports.queue, lambda: devices.found)
    deps = RunnerApiDeps(
        config=config,
        inference=inference,
        runner=ports.runner,
        operations=ports.operations,
        observer=observer,
        devices=devices,
        started=ticking.monotonic(),
        extensions=ports.extensions,
    )
    return RunnerApiService(deps)


def create_app(deps: RunnerApiDeps) -> EdgeApp:
    """Returns the application of one runner."""
    app = bare_app("weft runner", deps.inference, RUNNER_ROUTERS)
    # Before the endpoints of models, whose names may have slashes.
    app.serve(RUNNER_OPERATIONS, {RunnerApiDeps: deps})
    app.serve(OPENAI, {InferenceDeps: deps.inference})
    app.serve(RUNNER_STATE)
    app.serve(PROBES)
    if deps.config.metrics:
        app.serve(METRICS)
    app.serve(DOCUMENT)
    for hook in _of_runners(deps.extensions):
        app.defer(DeferredApi(name=hook.place, paths=hook.paths, load=partial(_loaded, hook)))
    return app


def _loaded(hook: ApiHook) -> Callable[[EdgeApp], None]:
    return partial(EdgeApp.serve, router=load_hook(hook.place, HttpApi).router)


class RunnerApiService(Service):
    """The HTTP API of a runner."""

    def __init__(self, deps: RunnerApiDeps) -> None:
        edge, metrics = deps.config.edge, deps.inference.metrics
        self._devices = deps.devices
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
            app.serve(METRICS, {InferenceDeps: deps.inference})
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
        """The URL of the additional /metrics port; empty: none."""
        return "" if self._metrics_server is None else self._metrics_server.url

    async def start(self) -> None:
        """Binds and accepts; answers 503 while the runner starts. Raises a WeftError if an address is unusable."""
        await self._devices.start()
        for server in self._servers():
            await server.start()

    async def stop(self, grace_seconds: float) -> None:
        """See `weft.kernel.services.service_lifecycle.Service.stop`."""
        for server in self._servers():
            server.request_stop(grace_seconds)
        for server in self._servers():
            await server.wait_stopped()
        await self._devices.stop()

    def _servers(self) -> list[AppServer]:
        return [self._server, *([self._metrics_server] if self._metrics_server is not None else [])]
