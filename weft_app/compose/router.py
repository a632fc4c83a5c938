"""Configuration and serving of a router."""

import os

import grpc

import router_svc.router_service
from router_svc.registry_session import RouterAnnouncement
from weft.extension import enabled_extensions
from weft.kernel.channels.rpc import open_channel
from weft.kernel.services.health_monitor import HealthMonitor
from weft.kernel.time.clock import SystemClock
from weft_app.compose.certificate_expiry import CertificateExpiry
from weft_app.compose.home import WeftHome, keep_address
from weft_app.compose.join_listeners import join_listeners
from weft_app.compose.process_metrics import metrics_services, page_if_served
from weft_app.compose.process_service import ProcessService
from weft_app.compose.security import channel_security, key_check, key_followers, new_host
from weft_app.compose.service_configs import router_config
from weft_app.compose.serving import Announce, registry_address, serve_until_stopped
from weft_app.compose.tracing import close_tracing, tracing_of
from weft_app.config.config import WeftConfig


async def serve_router(
    config: WeftConfig,
    home: WeftHome,
    listen: str | None,
    announce: Announce,
) -> None:
    """Serves a router until a signal arrives."""
    # Imported here: a runner's own router (weft_app.compose.runner_http) stores nothing and has no database package.
    from router_svc.leader import SILENCE_SECONDS  # noqa: PLC0415
    from router_svc.store.database import ROUTER_OWNER  # noqa: PLC0415
    from weft.sql.ownership import OwnershipGuard, StandbyPair  # noqa: PLC0415
    from weft.sql.standby import owner_watch_of  # noqa: PLC0415
    from weft_app.compose.dump import warn_left_behind  # noqa: PLC0415
    from weft_app.compose.durable_services import router_stores  # noqa: PLC0415

    warn_left_behind(config, home)
    clock = SystemClock()
    keys, registry = key_check(config, clock), registry_address(config, home)
    guard = OwnershipGuard()
    host = new_host(config, "router", keys, first_guard=guard)
    address = host.bind(listen or home.address("router"))
    tracing = tracing_of(os.environ)
    page = page_if_served(config)
    settings = router_config(config, registry, address)
    observer = None
    if page is not None:
        from router_svc.router_metrics import RouterMetrics  # noqa: PLC0415 - only where there is a page

        observer = RouterMetrics(page)
    extensions = enabled_extensions(config.extensions.disabled)
    service = router_svc.router_service.build(settings, tracing=tracing, observer=observer, extensions=extensions)
    stores = router_stores(config, home, service, address, page)
    database, leading = stores.database, stores.leading(service, clock)
    watch = owner_watch_of(database.address, ROUTER_OWNER, clock, SILENCE_SECONDS)
    paired = StandbyPair(
        leading, ROUTER_OWNER, watch, clock, names_owner=keys is None, also_guards=service.service_names
    )
    guard.use(paired)

    def call_registry() -> grpc.aio.Channel:
        return open_channel(registry, channel_security(config))

    announcement = RouterAnnouncement(
        settings.name,
        address,
        call_registry,
        clock,
        leads=lambda: paired.is_owner and leading.heartbeats.is_current,
        shares_database=database.is_shared,
    )
    listeners = join_listeners(config, home, service)
    checks = [*service.health_checks(), *paired.health_checks(), *CertificateExpiry(config).health_checks()]
    monitor = HealthMonitor(checks, clock)

    async def note_takeover() -> None:
        await monitor.check()
        await announcement.tell()

    # Announces a takeover to the mesh, and the leader's address to this home's commands.
    paired.on_takeover(note_takeover)
    paired.on_owner(lambda leader: keep_address(home.owner_file("router"), leader or None))
    # Listeners drain last if another router can lead meanwhile; otherwise this one continues to place requests.
    last = (listeners,) if database.is_shared else ()
    try:
        await serve_until_stopped(
            host,
            paired,
            config,
            lambda: announce(address),
            before=[service, *last],
            companions=[
                *key_followers(keys, registry, channel_security(config)),
                announcement,
                *(() if last else (listeners,)),
                *metrics_services(config, page, "router", monitor, keys),
                ProcessService(monitor, schemas=(database,)),
            ],
            monitor=monitor,
        )
    finally:
        keep_address(home.owner_file("router"), None)
        await close_tracing(tracing)
