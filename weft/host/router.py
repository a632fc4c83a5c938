"""How a router is set up and run. The only module besides `up` that imports it."""

import os
from collections.abc import Mapping

import router_svc.service
from router_svc.config import RelayConfig, RouterConfig
from router_svc.policy.limits import SchedulerLimits
from weft.host.config import WeftConfig
from weft.host.grpc_host import GrpcHost
from weft.host.home import WeftHome
from weft.host.relay import relay_doors
from weft.host.serving import Announce, registry_address, serve_until_stopped


def router_config(config: WeftConfig, registry_address: str, address: str = "") -> RouterConfig:
    """The router that reads the registry at an address; `address` is its own, for runners behind its relay."""
    section = config.router
    return RouterConfig(
        registry_address=registry_address,
        ticket_lifetime_seconds=section.ticket_lifetime_seconds,
        default_timeout_seconds=config.gateway.request_timeout_seconds,
        wake_recipes=frozenset(section.wake_recipes),
        wake_environment=_wake_environment(os.environ),
        limits=SchedulerLimits(
            queue_depth_per_runner=section.queue_depth_per_runner,
            queue_timeout_seconds=section.queue_timeout_seconds,
            max_attempts=section.max_attempts,
            wake_settle_seconds=section.wake_settle_seconds,
        ),
        relay=_relay_config(config, address),
    )


def _relay_config(config: WeftConfig, address: str) -> RelayConfig | None:
    section = config.relay
    if section.listen is None:
        return None
    return RelayConfig(
        address=address,
        max_links=section.max_links,
        max_calls_per_link=section.max_calls_per_link,
        open_timeout_seconds=section.open_timeout_seconds,
    )


def _wake_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What recipes may see: the search path, and what was set for them. Models bring recipes, so not the rest."""
    return {name: value for name, value in environment.items() if name == "PATH" or name.startswith("WEFT_WAKE_")}


async def serve_router(config: WeftConfig, home: WeftHome, listen: str | None, announce: Announce) -> None:
    """A router until a signal comes."""
    host = GrpcHost()
    address = host.bind(listen or home.address("router"))
    service = router_svc.service.build(router_config(config, registry_address(config, home), address))
    doors = relay_doors(config.relay, home, service.relay)
    await serve_until_stopped(host, service, config, lambda: announce(address), beside=doors)
