"""The endpoint picker in the process of a router: its collaborators, and the listeners of its own."""

import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc
from typing_extensions import override

import gateway.picker.service
from gateway.app import gate_of
from gateway.auth.rate_limits import TenantRateLimits
from gateway.deps import InferenceDeps
from gateway.metrics import GatewayMetrics
from gateway.picker.lane_requests import LanePorts
from gateway.picker.limits import PickerLimits
from gateway.picker.service import ON_THIS_MACHINE, PickerService, PickerServing
from router_svc.service import RouterService
from weft.dispatch.dispatcher import Dispatcher
from weft.dispatch.reconnecting_placement import ReconnectConfig
from weft.durable.journal_policy import JournalPolicy
from weft.kernel.address import TLS_PREFIX, is_any_host, is_local
from weft.kernel.clock import SystemClock
from weft.kernel.errors import invalid_field
from weft.kernel.health_monitor import HealthMonitor
from weft.kernel.lane_names import PICKER_HEALTH_PORT, PICKER_PORT
from weft.kernel.rpc_server.server import LocalServer, takes
from weft.kernel.service import Service
from weft.kernel.settings import values_of
from weft.kernel.tracing import ServiceName
from weft_app.compose.certificate import self_signed_certificate
from weft_app.compose.gateway import gateway_config
from weft_app.compose.grpc_host import GrpcHost
from weft_app.compose.home import WeftHome
from weft_app.compose.journal import journal_rules
from weft_app.compose.security import KeyCheck, keys_required, server_tls
from weft_app.config.config import WeftConfig

if TYPE_CHECKING:
    from weft.kernel.metrics import MetricsPage

DEFAULT_LISTEN = f"127.0.0.1:{PICKER_PORT}"
DEFAULT_HEALTH_LISTEN = f"127.0.0.1:{PICKER_HEALTH_PORT}"


def build_picker(
    config: WeftConfig,
    router: RouterService,
    keys: KeyCheck | None,
    *,
    gateway_address: str = "",
    metrics: "MetricsPage | None" = None,
    serving: PickerServing = ON_THIS_MACHINE,
) -> PickerService:
    """Returns the picker of a router; its reports go there. Must be called before the router registers."""
    edge, clock = gateway_config(config), SystemClock()
    steady = ReconnectConfig(router_outage_limit_seconds=config.gateway.router_outage_limit_seconds)
    deps = InferenceDeps(
        config=edge,
        dispatcher=Dispatcher(router.placement, router.channels, clock=clock, fleet=router),
        fleet=router,
        # For the names of models alone: the picker has metrics of its own.
        metrics=GatewayMetrics(),
        clock=clock,
        gate=gate_of(keys, clock),
        rate_limits=None if edge.rate_limits is None else TenantRateLimits(edge.rate_limits, clock),
        tracing=router.tracing,
        service=ServiceName.ROUTER,
    )
    ports = LanePorts(
        placement=router.placement,
        fleet=router,
        channels=router.channels,
        clock=clock,
        report_to=router.name,
        host=socket.gethostname(),
        sign_interval_seconds=config.edge.log_interval_seconds,
        steady=steady,
        tracing=router.tracing,
        amend=router.amend_receipt,
        lost=router,
    )
    picker = gateway.picker.service.build(
        PickerLimits(**values_of(PickerLimits, config.picker)),
        deps,
        ports,
        JournalPolicy(router, journal_rules(config.router)),
        gateway=gateway_address or config.picker.gateway or "",
        metrics=metrics,
        serving=serving,
    )
    router.hear_attempts(picker.reports)
    return picker


class PickerEndpoint(Service):
    """Serves a picker at addresses of its own, beside the router of this process: it starts later and stops earlier."""

    service_names: Sequence[str] = ()

    def __init__(
        self, config: WeftConfig, picker: PickerService, router: RouterService, *, is_secure: bool = False
    ) -> None:
        self._config = config
        self._picker = picker
        checks = [replace(check, services=tuple(picker.service_names)) for check in router.health_checks(config.health)]
        self._monitor = HealthMonitor(checks, SystemClock(), config.health)
        self._is_secure = is_secure
        # A proxy of this machine needs no key; from elsewhere it shows a certificate.
        self._host = self._new_host()
        self._health = GrpcHost(tls=server_tls(config, "router"), is_public=True)
        self.address = ""
        """Where it listens, once it is bound."""
        self.health_address = ""

    def _new_host(self, server: grpc.aio.Server | None = None) -> GrpcHost:
        return GrpcHost(server, tls=server_tls(self._config, "router"), is_public=self._is_secure)

    def bind(self, listen: str, health_listen: str | None) -> str:
        """Listens; returns the address. Raises as `GrpcHost.bind`."""
        if takes(listen):
            # Most of what gRPC's own server costs a request: see bench/results/2026-11-23-lane.md.
            self._host = self._new_host(LocalServer())
        self.address = self._host.bind(listen)
        if health_listen is not None:
            self.health_address = self._health.bind(health_listen)
        return self.address

    def bind_secure(self, listen: str, health_listen: str, home: WeftHome) -> str:
        """Listens with a certificate of its own, and in plaintext for probes of health; returns the address.

        Callers are known by their keys alone. Raises INVALID_ARGUMENT where others than this machine could call without
        one, and as `GrpcHost.bind`.
        """
        if not (keys_required(self._config) or is_local(listen)):
            raise invalid_field("--secure-serving", f"{listen} is not on this machine, which needs auth.required: true")
        host = listen.rpartition(":")[0]
        names = [] if is_any_host(host) else [host.strip("[]")]
        certificate = self_signed_certificate(home.state / "picker", names)
        self.address = self._host.bind(f"{TLS_PREFIX}{listen}", certificate.credentials())
        self.health_address = self._health.bind(health_listen, grpc.insecure_server_credentials())
        return self.address

    @override
    def register(self, server: grpc.aio.Server) -> None:
        """Registers nothing: it has a server of its own."""

    @override
    async def start(self) -> None:
        await self._host.start([self._picker], self._monitor)
        if self.health_address:
            await self._health.start([_HealthOf(self._picker)], self._monitor)

    @override
    async def stop(self, grace_seconds: float) -> None:
        await self._host.stop(grace_seconds)
        await self._health.stop(0.0)


class _HealthOf(Service):
    """The names of a service, whose health another listener shows."""

    def __init__(self, service: Service) -> None:
        self._service = service

    @override
    @property
    def service_names(self) -> Sequence[str]:
        return self._service.service_names

    @override
    def register(self, server: grpc.aio.Server) -> None:
        """Registers nothing."""

    @override
    async def start(self) -> None:
        """Starts nothing."""

    @override
    async def stop(self, grace_seconds: float) -> None:
        """Stops nothing."""
