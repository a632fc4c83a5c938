"""How a gateway is set up and run. The only module besides `up` that imports it."""

from dataclasses import dataclass

import grpc

import gateway.service
from gateway.admin.operations_client import OperationsClient
from gateway.admin.ports import AdminPorts
from gateway.admin.runner_client import RunnerDescriptions
from gateway.config import GatewayConfig, RateLimitConfig
from gateway.ports import GatewayPorts
from gateway.registry_client import RegistryClient
from gateway.service import GatewayService
from weft.dispatch import Dispatcher
from weft.dispatch.fleet_watcher import FleetWatcher
from weft.dispatch.port import QueueSource
from weft.dispatch.remote import RemotePlacement
from weft.dispatch.requests import RemoteRequests, RequestSource
from weft.dispatch.steady import SteadyConfig
from weft.host.config import RateLimitsSection, WeftConfig
from weft.host.garbage import settle_garbage_collector
from weft.host.home import WeftHome
from weft.host.serving import Announce, registry_address, router_address
from weft.host.signals import stop_requested
from weft.kernel.clock import Clock, SystemClock
from weft.kernel.rates import parse_rate
from weft.kernel.rpc import ChannelPool, open_channel


def gateway_config(config: WeftConfig) -> GatewayConfig:
    """The HTTP edge."""
    section = config.gateway
    return GatewayConfig(
        host=config.host,
        port=config.port,
        max_body_bytes=section.max_body_bytes,
        request_timeout_seconds=section.request_timeout_seconds,
        sse_keepalive_seconds=section.sse_keepalive_seconds,
        headers_within_seconds=section.headers_within_seconds,
        write_timeout_seconds=section.write_timeout_seconds,
        registry_timeout_seconds=section.registry_timeout_seconds,
        max_event_watches=section.max_event_watches,
        rate_limits=_rate_limits(section.rate_limits),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshClients:
    """What a gateway is built over."""

    dispatcher: Dispatcher
    fleet: FleetWatcher
    registry: grpc.aio.Channel
    channels: ChannelPool
    queues: QueueSource
    requests: RequestSource
    clock: Clock


def _rate_limits(section: RateLimitsSection | None) -> RateLimitConfig | None:
    if section is None:
        return None
    rates = {
        tenant: parse_rate(text, f"gateway.rate_limits.tenants.{tenant}") for tenant, text in section.tenants.items()
    }
    return RateLimitConfig(default=parse_rate(section.default, "gateway.rate_limits.default"), tenants=rates)


def build_gateway(config: WeftConfig, mesh: MeshClients) -> GatewayService:
    """A gateway over a mesh; not started yet."""
    edge = gateway_config(config)
    timeout = edge.registry_timeout_seconds
    admin = AdminPorts(
        operations=OperationsClient(mesh.registry, timeout_seconds=timeout),
        instances=RunnerDescriptions(mesh.fleet, mesh.channels, mesh.clock),
        queues=mesh.queues,
    )
    ports = GatewayPorts(
        dispatcher=mesh.dispatcher,
        fleet=mesh.fleet,
        registry=RegistryClient(mesh.registry, mesh.fleet, timeout_seconds=timeout),
        admin=admin,
        requests=mesh.requests,
    )
    return gateway.service.build(edge, ports)


async def serve_gateway(config: WeftConfig, home: WeftHome, announce: Announce) -> None:
    """A gateway over a registry and a router elsewhere, until a signal comes."""
    stop = stop_requested()
    clock = SystemClock()
    registry, router = open_channel(registry_address(config, home)), open_channel(router_address(config, home))
    channels = ChannelPool()
    fleet = FleetWatcher(registry, clock)
    steady = SteadyConfig(router_outage_limit_seconds=config.gateway.router_outage_limit_seconds)
    placement = RemotePlacement(router)
    dispatcher = Dispatcher(placement, channels, clock=clock, steady=steady, fleet=fleet)
    mesh = MeshClients(
        dispatcher=dispatcher,
        fleet=fleet,
        registry=registry,
        channels=channels,
        queues=placement,
        requests=RemoteRequests(router),
        clock=clock,
    )
    service = build_gateway(config, mesh)
    try:
        await fleet.start()
        await service.start()
        settle_garbage_collector()
        announce(service.url)
        await stop.wait()
    finally:
        await service.stop(config.drain_seconds)
        await fleet.stop()
        await channels.close()
        await registry.close()
        await router.close()
