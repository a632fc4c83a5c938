"""Configuration and serving of a router."""

import os
import socket

import grpc

import router_svc.service
from router_svc.announcement import RouterAnnouncement, default_router_name
from router_svc.client_registry import ClientsConfig
from router_svc.config import RelayConfig, RouterConfig
from router_svc.policy.limits import QueueLimits, SchedulerLimits
from router_svc.policy.settings import RateLimitConfig, TenantRates
from router_svc.settings import RouterSettings
from weft.kernel.clock import SystemClock
from weft.kernel.health_monitor import HealthMonitor
from weft.kernel.rpc import open_channel
from weft.kernel.settings import values_of
from weft_app.compose.environment import DEFAULT_RATES
from weft_app.compose.home import WeftHome, keep_address
from weft_app.compose.join_listeners import join_listeners
from weft_app.compose.journal import journal_rules
from weft_app.compose.metrics import metrics_services, page_if_served
from weft_app.compose.process_service import ProcessService
from weft_app.compose.security import channel_security, key_check, key_followers, new_host
from weft_app.compose.serving import Announce, registry_address, serve_until_stopped
from weft_app.compose.tracing import close_tracing, tracing_of
from weft_app.config.config import WeftConfig


def router_config(config: WeftConfig, registry_address: str, address: str = "") -> RouterConfig:
    """Returns the configuration of a router.

    `address` is its own, for gateways and runners behind its relay. Without one it is not part of the mesh and places
    all requests.
    """
    section = config.router
    rates, default_rates = section.rate_limits or TenantRates(), DEFAULT_RATES if section.multi_tenant else ()
    return RouterConfig(
        registry_address=registry_address,
        name=(section.name or default_router_name(socket.gethostname(), address)) if address else "",
        address=address,
        security=channel_security(config),
        default_timeout_seconds=config.gateway.request_timeout_seconds,
        wake_recipes=section.wake_recipes,
        # Recipes come with models, so they get no other variables.
        wake_environment={
            name: value for name, value in os.environ.items() if name == "PATH" or name.startswith("WEFT_WAKE_")
        },
        limits=scheduler_limits(section),
        settings=section,
        clients=ClientsConfig(profiles=section.clients),
        rate_limits=RateLimitConfig(
            default=default_rates if rates.default is None else rates.default, tenants=rates.tenants
        ),
        relay=None if config.relay.listen is None else RelayConfig(address=address),
        journal=journal_rules(section),
    )


def scheduler_limits(section: RouterSettings) -> SchedulerLimits:
    """Returns the limits of the scheduler."""
    return SchedulerLimits(**values_of(QueueLimits, section))


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
    from weft.sql.ownership import OwnershipGuard, Paired  # noqa: PLC0415
    from weft.sql.standby import owner_watch_of  # noqa: PLC0415
    from weft_app.compose.durable_services import router_stores  # noqa: PLC0415

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
        from router_svc.metrics import RouterMetrics  # noqa: PLC0415 - only where there is a page

        observer = RouterMetrics(page)
    service = router_svc.service.build(settings, tracing=tracing, observer=observer)
    stores = router_stores(config, home, service, address, page)
    database, leading = stores.database, stores.leading(service, clock)
    watch = owner_watch_of(database.address, ROUTER_OWNER, clock, SILENCE_SECONDS)
    paired = Paired(leading, ROUTER_OWNER, watch, clock, names_owner=keys is None, also_guards=service.service_names)
    guard.use(paired)

    def call_registry() -> grpc.aio.Channel:
        return open_channel(registry, channel_security(config))

    announcement = RouterAnnouncement(
        settings.name,
        address,
        call_registry,
        clock,
        leads=lambda: paired.is_owner and leading.beats.is_current,
        shares_database=database.is_shared,
    )
    listeners = join_listeners(config, home, service)
    monitor = HealthMonitor([*service.health_checks(), *paired.health_checks()], clock)

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
                *metrics_services(config, page, "router", monitor),
                ProcessService("router", monitor, call_registry, schemas=(database,)),
            ],
            monitor=monitor,
        )
    finally:
        keep_address(home.owner_file("router"), None)
        await close_tracing(tracing)
