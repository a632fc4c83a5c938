"""The gateway as a service of `weft_app.compose`: binds, serves and drains in the host's event loop."""

from collections.abc import Awaitable
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.app import app_over, finisher_over, gateway_deps
from gateway.auth.authentication import HOME_SOCKET
from gateway.gateway_config import GatewayConfig
from gateway.gateway_metrics import GatewayMetrics
from gateway.http.event_watches import EventWatches
from gateway.http.server import AppServer
from gateway.ports import GatewayPorts
from weft.kernel.services.service_lifecycle import Service, start_restarting, stop_tasks
from weft.kernel.telemetry.metrics_page import MetricsPage
from weft.kernel.time.clock import Clock, SystemClock

if TYPE_CHECKING:
    import asyncio

LAST_REPORTS_SECONDS = 1.0
"""How long a stopping gateway waits, after its drain, for routers to accept the ends that it has to report."""


def build(
    config: GatewayConfig,
    ports: GatewayPorts,
    *,
    metrics: MetricsPage | None = None,
    clock: Clock | None = None,
    socket_path: Path | None = None,
) -> "GatewayService":
    """Returns a gateway that is not started. `metrics` receives its metrics; None: a separate page.

    `socket_path`: an additional Unix socket, on which callers without a key are local.
    """
    metrics_of = GatewayMetrics(metrics)
    return GatewayService(config, ports, metrics=metrics_of, clock=clock or SystemClock(), socket_path=socket_path)


class GatewayService(Service):
    """A gateway, over HTTP only."""

    def __init__(
        self,
        config: GatewayConfig,
        ports: GatewayPorts,
        *,
        metrics: GatewayMetrics,
        clock: Clock,
        socket_path: Path | None = None,
    ) -> None:
        self._ports = ports
        if ports.ends is not None:
            ports.ends.on_fate = metrics.end_reported
        self._watches = EventWatches(config.max_event_watches)
        self._finishing: asyncio.Task[None] | None = None
        self._deps = gateway_deps(config, ports, watches=self._watches, metrics=metrics, clock=clock)
        self._app: ASGIApp = app_over(self._deps, ports)
        self._server = AppServer(
            self._serve, exposure=config.exposure(), limits=config.connections, on_refused=metrics.refused
        )
        self._home_server = None
        if socket_path is not None:
            self._home_server = AppServer(
                self._serve_home,
                exposure=config.exposure(),
                limits=config.connections,
                on_refused=metrics.refused,
                name="home",
                socket_path=socket_path,
            )

    def reconfigure(self, config: GatewayConfig) -> None:
        """Applies other settings to new requests; running ones keep theirs.

        Address, TLS, limits of connections, and bounds of event watches, running responses and finishing batches stay.
        """
        deps = self._deps
        self._deps = gateway_deps(
            config, self._ports, watches=self._watches, metrics=deps.metrics, clock=deps.clock, earlier=deps
        )
        self._app = app_over(self._deps, self._ports)

    def _serve(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return self._app(scope, receive, send)

    def _serve_home(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        scope[HOME_SOCKET] = True
        return self._app(scope, receive, send)

    @property
    def port(self) -> int:
        """The listening port; the configured one before the start."""
        return self._server.port

    @property
    def url(self) -> str:
        """The server's URL, such as `http://127.0.0.1:8080`."""
        return self._server.url

    async def start(self) -> None:
        """Binds and accepts. Raises a WeftError if the address is unavailable, or lacks the required protection."""
        await self._server.start()
        if self._home_server is not None:
            await self._home_server.start()
        finisher = finisher_over(self._deps, self._ports)
        if finisher is not None:
            self._finishing = start_restarting(finisher.run, name="batch-results", clock=self._deps.clock)

    async def stop(self, grace_seconds: float) -> None:
        """See `weft.kernel.services.service_lifecycle.Service.stop`."""
        servers = [each for each in (self._server, self._home_server) if each is not None]
        for each in servers:
            each.request_stop(grace_seconds)
        self._watches.close()
        for each in servers:
            await each.wait_stopped()
        if self._finishing is not None:
            await stop_tasks([self._finishing])
        if self._ports.ends is not None:
            await self._ports.ends.stop(min(grace_seconds, LAST_REPORTS_SECONDS))
