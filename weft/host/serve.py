"""One service in a process of its own."""

from collections.abc import Callable

import gateway.service
import registry_svc.service
import router_svc.service
import runner_svc.service
from weft.dispatch import Dispatcher
from weft.dispatch.fleet import FleetWatcher
from weft.dispatch.remote import RemotePlacement
from weft.host.assemble import (
    at_address,
    configured_runners,
    gateway_config,
    registry_config,
    router_config,
    runner_config,
)
from weft.host.config import RunnerSection, WeftConfig
from weft.host.grpc_host import GrpcHost
from weft.host.home import WeftHome
from weft.host.signals import stop_requested
from weft.kernel.clock import SystemClock
from weft.kernel.errors import invalid_field
from weft.kernel.rpc import ChannelPool, open_channel

Announce = Callable[[str], None]


async def serve_registry(config: WeftConfig, home: WeftHome, listen: str | None, announce: Announce) -> None:
    """The registry until a signal comes."""
    host = GrpcHost()
    address = host.bind(listen or home.address("registry"))
    await _serve(host, registry_svc.service.build(registry_config(config, home)), config, lambda: announce(address))


async def serve_router(config: WeftConfig, home: WeftHome, listen: str | None, announce: Announce) -> None:
    """A router until a signal comes."""
    host = GrpcHost()
    address = host.bind(listen or home.address("router"))
    service = router_svc.service.build(router_config(config, registry_address(config, home)))
    await _serve(host, service, config, lambda: announce(address))


async def serve_runner(
    config: WeftConfig, home: WeftHome, listen: str | None, announce: Announce, *, name: str | None
) -> None:
    """A runner until a signal comes; with its backends gone when this returns."""
    section = _pick_runner(configured_runners(config), name)
    host = GrpcHost()
    address = host.bind(listen or home.address(f"runner-{section.name}"))
    built = runner_config(section, home, listen=address, registry_address=registry_address(config, home))
    service = runner_svc.service.build(at_address(built, address))
    await _serve(host, service, config, lambda: announce(address))


async def serve_gateway(config: WeftConfig, home: WeftHome, announce: Announce) -> None:
    """A gateway over a registry and a router elsewhere, until a signal comes."""
    stop = stop_requested()
    clock = SystemClock()
    registry, router = open_channel(registry_address(config, home)), open_channel(router_address(config, home))
    channels = ChannelPool()
    fleet = FleetWatcher(registry, clock)
    dispatcher = Dispatcher(RemotePlacement(router), channels, clock=clock)
    service = gateway.service.build(gateway_config(config), dispatcher=dispatcher, fleet=fleet)
    try:
        await fleet.start()
        await service.start()
        announce(f"http://{config.host}:{service.port}")
        await stop.wait()
    finally:
        await service.stop(config.drain_seconds)
        await fleet.stop()
        await channels.close()
        await registry.close()
        await router.close()


def registry_address(config: WeftConfig, home: WeftHome) -> str:
    """Where the registry is: as configured, or its socket under the home."""
    return config.addresses.registry or home.address("registry")


def router_address(config: WeftConfig, home: WeftHome) -> str:
    """Where the router is: as configured, or its socket under the home."""
    return config.addresses.router or home.address("router")


async def _serve(
    host: GrpcHost,
    service: registry_svc.service.RegistryService | router_svc.service.RouterService | runner_svc.service.RunnerService,
    config: WeftConfig,
    started: Callable[[], None],
) -> None:
    stop = stop_requested()
    try:
        await host.start([service])
        started()
        await stop.wait()
    finally:
        await host.stop(config.drain_seconds)


def _pick_runner(runners: tuple[RunnerSection, ...], name: str | None) -> RunnerSection:
    names = ", ".join(runner.name for runner in runners)
    if name is None and len(runners) == 1:
        return runners[0]
    found = next((runner for runner in runners if runner.name == name), None)
    if found is None:
        raise invalid_field("--runner", f"must be one of: {names}")
    return found
