"""What the `serve` commands share: where services find each other, and the life of one of them."""

from collections.abc import Callable, Sequence

from weft.host.config import WeftConfig
from weft.host.critical import CriticalTasks
from weft.host.grpc_host import GrpcHost
from weft.host.home import WeftHome
from weft.host.signals import stop_requested, until
from weft.kernel.garbage import settle_garbage_collector
from weft.kernel.service import Service

Announce = Callable[[str], None]


def registry_address(config: WeftConfig, home: WeftHome) -> str:
    """Where the registry is: as configured, or its socket under the home."""
    return config.addresses.registry or home.address("registry")


def router_address(config: WeftConfig, home: WeftHome) -> str:
    """Where the router is: as configured, or its socket under the home."""
    return config.addresses.router or home.address("router")


async def serve_until_stopped(
    host: GrpcHost,
    service: Service,
    config: WeftConfig,
    started: Callable[[], None],
    *,
    beside: Sequence[Service] = (),
) -> None:
    """Run one service on a bound server until a signal comes, then drain it; those beside it end before it does.

    The death of a critical task of theirs ends it as well, and raises INTERNAL after the drain.
    """
    stop = stop_requested()
    with CriticalTasks(stop):
        try:
            if await until(stop, host.start([service, *beside])):
                settle_garbage_collector()
                started()
                await stop.wait()
        finally:
            await host.stop(config.drain_seconds)
