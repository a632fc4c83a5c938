"""Shared by the `serve` commands: addresses of services, and the life of one service."""

from collections.abc import Callable, Sequence

from weft.kernel.gc_tuning import settle_garbage_collector
from weft.kernel.service import Service
from weft_app.compose.grpc_host import GrpcHost
from weft_app.compose.home import WeftHome
from weft_app.compose.shutdown import CriticalTasks, stop_requested, until
from weft_app.config.config import WeftConfig

Announce = Callable[[str], None]


def registry_address(config: WeftConfig, home: WeftHome) -> str:
    """The registry's address: as configured, or its socket under the home."""
    return config.addresses.registry or home.address("registry")


def router_address(config: WeftConfig, home: WeftHome) -> str:
    """The router's address: as configured, or its socket under the home."""
    return config.addresses.router or home.address("router")


async def serve_until_stopped(
    host: GrpcHost,
    service: Service,
    config: WeftConfig,
    started: Callable[[], None],
    *,
    beside: Sequence[Service] = (),
) -> None:
    """Runs one service on a bound server until a signal comes, then drains it; services beside it end before it does.

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
