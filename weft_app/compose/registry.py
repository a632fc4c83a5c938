"""Configuration and serving of the registry."""

import os
from dataclasses import replace

import registry_svc.registry_service
from weft.kernel.services.health_monitor import HealthMonitor
from weft.kernel.time.clock import SystemClock
from weft.sql.ownership import OwnershipGuard
from weft_app.compose.certificate_expiry import CertificateExpiry
from weft_app.compose.dump import warn_left_behind
from weft_app.compose.home import WeftHome, keep_address
from weft_app.compose.process_metrics import metrics_services, page_if_served
from weft_app.compose.process_service import ProcessService
from weft_app.compose.security import key_check, new_host
from weft_app.compose.service_configs import registry_config
from weft_app.compose.serving import Announce, serve_until_stopped
from weft_app.compose.tracing import close_tracing, tracing_of
from weft_app.config.config import WeftConfig


async def serve_registry(config: WeftConfig, home: WeftHome, listen: str | None, announce: Announce) -> None:
    """Serves the registry until a signal arrives."""
    warn_left_behind(config, home)
    keys = key_check(config, SystemClock())
    guard = OwnershipGuard()
    host = new_host(config, "registry", keys, first_guard=guard)
    address = host.bind(listen or home.address("registry"))
    tracing = tracing_of(os.environ)
    paired, service = registry_svc.registry_service.build_paired(
        replace(registry_config(config, home), address=address), names_owner=keys is None, tracing=tracing
    )
    guard.use(paired)
    if keys is not None:
        keys.use(lambda: service.key_ring)
    monitor = HealthMonitor([*paired.health_checks(), *CertificateExpiry(config).health_checks()], SystemClock())
    paired.on_takeover(monitor.check)
    # A standby does not answer calls: commands of this home use the owner's address.
    paired.on_owner(lambda owner: keep_address(home.owner_file("registry"), owner or None))
    page = page_if_served(config)
    if page is not None:
        from registry_svc.registry_metrics import add_registry_metrics  # noqa: PLC0415 - only where there is a page

        add_registry_metrics(service.figures, page)
        page.add_spans(tracing)
    companions = [
        ProcessService(
            monitor,
            schemas=(service,),
            watching=service.watching.listed,
        ),
        *metrics_services(config, page, "registry", monitor, keys),
    ]
    try:
        await serve_until_stopped(
            host, paired, config, lambda: announce(address), companions=companions, monitor=monitor
        )
    finally:
        keep_address(home.owner_file("registry"), None)
        await close_tracing(tracing)
