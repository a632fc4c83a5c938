"""How a router is set up and run. The only module besides `up` that imports it."""

import router_svc.service
from router_svc.config import RouterConfig
from router_svc.policy.scheduler import SchedulerLimits
from weft.host.config import WeftConfig
from weft.host.grpc_host import GrpcHost
from weft.host.home import WeftHome
from weft.host.serving import Announce, registry_address, serve_until_stopped


def router_config(config: WeftConfig, registry_address: str) -> RouterConfig:
    """The router that reads the registry at an address."""
    section = config.router
    return RouterConfig(
        registry_address=registry_address,
        ticket_lifetime_seconds=section.ticket_lifetime_seconds,
        default_timeout_seconds=config.gateway.request_timeout_seconds,
        limits=SchedulerLimits(
            queue_depth_per_runner=section.queue_depth_per_runner,
            queue_timeout_seconds=section.queue_timeout_seconds,
            max_attempts=section.max_attempts,
        ),
    )


async def serve_router(config: WeftConfig, home: WeftHome, listen: str | None, announce: Announce) -> None:
    """A router until a signal comes."""
    host = GrpcHost()
    address = host.bind(listen or home.address("router"))
    service = router_svc.service.build(router_config(config, registry_address(config, home)))
    await serve_until_stopped(host, service, config, lambda: announce(address))
