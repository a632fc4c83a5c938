"""How a gateway is set up and run. The only module besides `up` that imports it."""

import grpc

import gateway.service
from gateway.config import GatewayConfig
from gateway.registry_client import RegistryClient
from gateway.service import GatewayService
from weft.dispatch import Dispatcher
from weft.dispatch.fleet import FleetWatcher
from weft.dispatch.remote import RemotePlacement
from weft.dispatch.steady import SteadyConfig
from weft.host.config import WeftConfig
from weft.host.garbage import settle_garbage_collector
from weft.host.home import WeftHome
from weft.host.serving import Announce, registry_address, router_address
from weft.host.signals import stop_requested
from weft.kernel.clock import SystemClock
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
    )


def build_gateway(
    config: WeftConfig, dispatcher: Dispatcher, fleet: FleetWatcher, registry: grpc.aio.Channel
) -> GatewayService:
    """A gateway over a dispatcher and the registry at the end of a channel; not started yet."""
    edge = gateway_config(config)
    client = RegistryClient(registry, fleet, timeout_seconds=edge.registry_timeout_seconds)
    return gateway.service.build(edge, dispatcher=dispatcher, fleet=fleet, registry=client)


async def serve_gateway(config: WeftConfig, home: WeftHome, announce: Announce) -> None:
    """A gateway over a registry and a router elsewhere, until a signal comes."""
    stop = stop_requested()
    clock = SystemClock()
    registry, router = open_channel(registry_address(config, home)), open_channel(router_address(config, home))
    channels = ChannelPool()
    fleet = FleetWatcher(registry, clock)
    steady = SteadyConfig(router_outage_limit_seconds=config.gateway.router_outage_limit_seconds)
    dispatcher = Dispatcher(RemotePlacement(router), channels, clock=clock, steady=steady, fleet=fleet)
    service = build_gateway(config, dispatcher, fleet, registry)
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
