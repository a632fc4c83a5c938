"""How the registry is set up and run. The only module besides `up` that imports it."""

import registry_svc.service
from registry_svc.config import RegistryConfig
from weft.host.config import WeftConfig
from weft.host.grpc_host import GrpcHost
from weft.host.home import WeftHome
from weft.host.serving import Announce, serve_until_stopped


def registry_config(config: WeftConfig, home: WeftHome) -> RegistryConfig:
    """The registry on its database under the home."""
    section = config.registry
    return RegistryConfig(
        database_url=section.database_url or f"sqlite+aiosqlite:///{home.state / 'registry.db'}",
        heartbeat_interval_seconds=section.heartbeat_interval_seconds,
        report_interval_seconds=section.report_interval_seconds,
        inactive_after_seconds=section.inactive_after_seconds,
        delete_after_seconds=section.delete_after_seconds,
        restart_grace_seconds=section.restart_grace_seconds,
        restart_spread_seconds=section.restart_spread_seconds,
        hibernating_keep_seconds=section.hibernating_keep_seconds,
    )


async def serve_registry(config: WeftConfig, home: WeftHome, listen: str | None, announce: Announce) -> None:
    """The registry until a signal comes."""
    host = GrpcHost()
    address = host.bind(listen or home.address("registry"))
    await serve_until_stopped(
        host, registry_svc.service.build(registry_config(config, home)), config, lambda: announce(address)
    )
