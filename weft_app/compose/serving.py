"""Serves one service until it is stopped. Also the addresses of registry and router."""

from collections.abc import Callable, Sequence

from weft.kernel.machine.memory_tuning import settle_memory
from weft.kernel.services.health_monitor import HealthMonitor
from weft.kernel.services.service_lifecycle import Service
from weft_app.compose.grpc_host import GrpcHost
from weft_app.compose.home import WeftHome
from weft_app.compose.shutdown import CriticalTasks, stop_requested, until
from weft_app.config.config import WeftConfig

Announce = Callable[[str], None]


def registry_address(config: WeftConfig, home: WeftHome) -> str:
    """Returns the registry's configured address, or its socket under the home."""
    return config.addresses.registry or home.address("registry")


def router_address(config: WeftConfig, home: WeftHome) -> str:
    """Returns the router's configured address, or its socket under the home."""
    return config.addresses.router or home.address("router")


async def serve_until_stopped(
    host: GrpcHost,
    service: Service,
    config: WeftConfig,
    started: Callable[[], None],
    *,
    before: Sequence[Service] = (),
    companions: Sequence[Service] = (),
    monitor: HealthMonitor | None = None,
) -> None:
    """Runs a service and its companions on a bound server until a signal arrives, then drains all of them.

    The companions drain first. Services in `before` start before it and stop after it. `monitor` checks their health.

    The death of a critical task has the same effect as a signal, and raises INTERNAL after the drain.
    """
    stop = stop_requested()
    with CriticalTasks(stop):
        try:
            if await until(stop, host.start([*before, service, *companions], monitor)):
                settle_memory()
                started()
                await stop.wait()
        finally:
            await host.stop(config.drain_seconds)
