"""The gateway as a service that `weft.host` composes: it binds, serves and drains inside the host's event loop."""

import asyncio
import errno
import ipaddress
import socket
from collections.abc import Sequence

import grpc
import structlog
from prometheus_client import CollectorRegistry

from gateway.app import create_app
from gateway.config import GatewayConfig
from gateway.event_watches import EventWatches
from gateway.metrics import GatewayMetrics
from gateway.ports import RegistryPort, RequestDispatcher
from gateway.protocol import EdgeServerConfig
from gateway.server import EdgeServer
from weft.dispatch.fleet import FleetSource
from weft.kernel.clock import Clock, SystemClock
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason

_BACKLOG = 2048

log = structlog.get_logger("weft.gateway")


def build(
    config: GatewayConfig,
    *,
    dispatcher: RequestDispatcher,
    fleet: FleetSource,
    registry: RegistryPort,
    metrics: CollectorRegistry | None = None,
    clock: Clock | None = None,
) -> "GatewayService":
    """A gateway that is not started. `metrics` receives its metrics; by default it has a registry of its own."""
    return GatewayService(
        config,
        dispatcher=dispatcher,
        fleet=fleet,
        registry=registry,
        metrics=GatewayMetrics(metrics),
        clock=clock or SystemClock(),
    )


class GatewayService:
    """Satisfies `weft.kernel.service.Service`; it serves HTTP, so it registers nothing on a gRPC server."""

    service_names: Sequence[str] = ()

    def __init__(
        self,
        config: GatewayConfig,
        *,
        dispatcher: RequestDispatcher,
        fleet: FleetSource,
        registry: RegistryPort,
        metrics: GatewayMetrics,
        clock: Clock,
    ) -> None:
        self._config = config
        self._watches = EventWatches(config.max_event_watches)
        self._app = create_app(
            config,
            dispatcher=dispatcher,
            fleet=fleet,
            registry=registry,
            watches=self._watches,
            metrics=metrics,
            clock=clock,
        )
        self._metrics = metrics
        self._server: EdgeServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self._address: tuple[str, int] | None = None

    @property
    def port(self) -> int:
        """The port it listens on; the configured one before the start."""
        return self._config.port if self._address is None else self._address[1]

    @property
    def url(self) -> str:
        """Where it answers, such as `http://127.0.0.1:8080`."""
        host = self._config.host if self._address is None else self._address[0]
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def register(self, server: grpc.aio.Server) -> None:
        """Nothing: it has no gRPC services."""

    async def start(self) -> None:
        """Bind and accept. Raises a WeftError if the address is not loopback or cannot be had."""
        listener = await _listen(self._config.host, self._config.port)
        self._address = listener.getsockname()[:2]
        self._server = EdgeServer(
            EdgeServerConfig(
                self._app,
                limits=self._config.connections,
                on_refused=self._metrics.refused,
                interface="asgi3",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
            )
        )
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name="gateway-http")
        started = asyncio.create_task(self._server.wait_started())
        await asyncio.wait((started, self._serving), return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            started.cancel()
            await self._serving
        log.info("gateway listens", url=self.url)

    async def stop(self, grace_seconds: float) -> None:
        """See `weft.kernel.service.Service.stop`."""
        server, serving = self._server, self._serving
        if server is None or serving is None:
            return
        server.request_stop(grace_seconds)
        self._watches.close()
        await serving
        self._server = self._serving = None


async def _listen(host: str, port: int) -> socket.socket:
    family, address = await _loopback_address(host, port)
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setblocking(False)
    try:
        listener.bind(address)
        # Now rather than when the server starts: a port that is taken shows here at the latest.
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _bind_error(error, host, port) from None
    return listener


async def _loopback_address(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """The resolved address: a spelling says nothing, 127.1 and 0x7f000001 are loopback, and a name may be anything."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        raise invalid_field("host", f"'{host}' is not an address of this machine") from None
    family, _, _, _, address = found[0]
    if not ipaddress.ip_address(address[0]).is_loopback:
        raise invalid_field(
            "host",
            f"'{host}' is not a loopback address; the gateway has no keys and no TLS yet, so it listens on 127.0.0.1 "
            "only: put a proxy with both in front of it",
        )
    return family, (str(address[0]), port)


def _bind_error(error: OSError, host: str, port: int) -> WeftError:
    if error.errno == errno.EADDRINUSE:
        return WeftError(
            Reason.ALREADY_EXISTS, f"port {port} on {host} is taken by another program; choose another with --port"
        )
    if error.errno == errno.EACCES:
        return WeftError(
            Reason.PERMISSION_DENIED, f"port {port} on {host} needs privileges; choose one above 1023 with --port"
        )
    return invalid_field("host", f"cannot listen on {host} port {port}: {error.strerror}")
