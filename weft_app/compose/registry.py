"""Configuration and serving of the registry."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import registry_svc.service
from registry_svc.config import (
    GovernanceConfig,
    GovernanceMode,
    GovernanceSettings,
    RegistryConfig,
    RegistrySettings,
)
from router_svc.policy.settings import RemotePermission, TenantSettings
from router_svc.settings import RouterSettings
from weft.api.registry.v1 import journal_pb2
from weft.api.registry.v1 import tenant_pb2 as pb
from weft.kernel.clock import SystemClock
from weft.kernel.errors import invalid_field
from weft.kernel.health_monitor import HealthMonitor
from weft.kernel.request import journal_mode_of
from weft.kernel.rpc import open_channel
from weft.kernel.settings import values_of
from weft.kernel.units import DAY, HOUR, MINUTE, MONTH, SECOND, WEEK, Rate, RateUnit
from weft.signing.tokens import read_shared_key
from weft.sql.ownership import OwnershipGuard
from weft_app.compose.environment import KEY_PATH_VARIABLE, allow_cloud_fallback
from weft_app.compose.home import WeftHome, keep_address
from weft_app.compose.metrics import metrics_services, page_if_served
from weft_app.compose.process_service import ProcessService
from weft_app.compose.security import channel_security, key_check, new_host
from weft_app.compose.serving import Announce, serve_until_stopped
from weft_app.compose.tracing import close_tracing, tracing_of
from weft_app.config.config import WeftConfig

_WINDOWS: Mapping[int, "pb.TenantLimit.Window.ValueType"] = {
    SECOND: pb.TenantLimit.WINDOW_SECOND,
    MINUTE: pb.TenantLimit.WINDOW_MINUTE,
    HOUR: pb.TenantLimit.WINDOW_HOUR,
    DAY: pb.TenantLimit.WINDOW_DAY,
    WEEK: pb.TenantLimit.WINDOW_WEEK,
    MONTH: pb.TenantLimit.WINDOW_MONTH,
}
_PERMISSIONS: Mapping[RemotePermission, "pb.RemotePermission.ValueType"] = {
    RemotePermission.NEVER: pb.REMOTE_PERMISSION_NEVER,
    RemotePermission.ON_REQUEST: pb.REMOTE_PERMISSION_UNSPECIFIED,
    RemotePermission.ALWAYS: pb.REMOTE_PERMISSION_ALWAYS,
}


def configured_tenants(section: RouterSettings) -> tuple[pb.TenantManifest, ...]:
    """Returns the configured tenants, sorted by name."""
    rates = {} if section.rate_limits is None else section.rate_limits.tenants
    names = sorted({*section.tenants, *rates})
    return tuple(_tenant(name, section.tenants.get(name, section.default_tenant), rates.get(name)) for name in names)


def _tenant(name: str, settings: TenantSettings, rates: Sequence[Rate] | None) -> pb.TenantManifest:
    return pb.TenantManifest(
        name=name,
        weight=None if settings.weight == 1.0 else settings.weight,
        max_in_flight=settings.max_in_flight,
        allow_remote=_PERMISSIONS[settings.allow_remote],
        journal=journal_pb2.JournalMode.ValueType(journal_mode_of(settings.journal).value),
        limits=_limits(rates or ()),
        unlimited=rates is not None and not rates,
    )


def _limits(rates: Sequence[Rate]) -> list[pb.TenantLimit]:
    """Returns rates as limits, with one limit for requests and tokens of the same window."""
    found: dict[int, pb.TenantLimit] = {}
    for rate in rates:
        limit = found.setdefault(rate.window_seconds, pb.TenantLimit(window=_WINDOWS[rate.window_seconds]))
        if rate.unit is RateUnit.TOKENS:
            limit.tokens = rate.amount
        else:
            limit.requests = rate.amount
    return list(found.values())


def registry_config(config: WeftConfig, home: WeftHome) -> RegistryConfig:
    """Returns the configuration of a registry. The database defaults to one under the home."""
    section = config.registry
    values = values_of(RegistrySettings, section) | {
        "database_url": section.database_url or home.state / "registry.db",
        "allow_cloud_fallback": allow_cloud_fallback(section.allow_cloud_fallback, os.environ),
        "ledger": replace(section.ledger, restart_grace_seconds=section.restart_grace_seconds),
        "governance": governance_config(section.governance, home),
        "keys": replace(section.keys, pepper_file=section.keys.pepper_file or home.state / "key-pepper"),
        "secrets": replace(section.secrets, key_file=section.secrets.key_file or home.state / "secret-keys"),
    }
    return RegistryConfig(**values, tenants=configured_tenants(config.router), security=channel_security(config))


async def serve_registry(config: WeftConfig, home: WeftHome, listen: str | None, announce: Announce) -> None:
    """Serves the registry until a signal arrives."""
    keys = key_check(config, SystemClock())
    guard = OwnershipGuard()
    host = new_host(config, "registry", keys, first_guard=guard)
    address = host.bind(listen or home.address("registry"))
    tracing = tracing_of(os.environ)
    paired, service = registry_svc.service.build_paired(
        replace(registry_config(config, home), address=address), names_owner=keys is None, tracing=tracing
    )
    guard.use(paired)
    if keys is not None:
        keys.use(lambda: service.key_ring)
    monitor = HealthMonitor(paired.health_checks(), SystemClock())
    paired.on_takeover(monitor.check)
    # A standby does not answer calls: commands of this home use the owner's address.
    paired.on_owner(lambda owner: keep_address(home.owner_file("registry"), owner or None))
    page = page_if_served(config)
    if page is not None:
        from registry_svc.metrics import add_registry_metrics  # noqa: PLC0415 - only where there is a page

        add_registry_metrics(service.figures, page)
        page.add_spans(tracing)
    companions = [
        ProcessService(
            "registry",
            monitor,
            lambda: open_channel(address, channel_security(config)),
            schemas=(service,),
            watching=service.watching.listed,
        ),
        *metrics_services(config, page, "registry", monitor),
    ]
    try:
        await serve_until_stopped(
            host, paired, config, lambda: announce(address), companions=companions, monitor=monitor
        )
    finally:
        keep_address(home.owner_file("registry"), None)
        await close_tracing(tracing)


DEFAULT_KEY_PATH = Path("/etc/safebox/model-api.key")
WITNESS_NAME = "governance-witness.json"

_KEY_FIELD = "registry.governance.key_file"


def governance_config(
    section: GovernanceSettings,
    home: WeftHome,
    *,
    environment: Mapping[str, str] | None = None,
    default_key_path: Path = DEFAULT_KEY_PATH,
) -> GovernanceConfig:
    """Returns the configuration of the registry's governance gate. `environment` defaults to this process's.

    Raises INVALID_ARGUMENT if a shared key is required and no valid one is found.
    """
    key = b""
    if section.mode is GovernanceMode.SHARED_KEY:
        key = _shared_key(section, os.environ if environment is None else environment, default_key_path)
    return GovernanceConfig(
        **values_of(GovernanceSettings, section), shared_key=key, witness_file=home.state / WITNESS_NAME
    )


def _shared_key(section: GovernanceSettings, environment: Mapping[str, str], default: Path) -> bytes:
    if section.key_file is not None:
        return read_shared_key(section.key_file.expanduser(), _KEY_FIELD)
    named = environment.get(KEY_PATH_VARIABLE)
    if named:
        return read_shared_key(Path(named).expanduser(), KEY_PATH_VARIABLE)
    if _may_be_there(default):
        return read_shared_key(default, _KEY_FIELD)
    raise invalid_field(_KEY_FIELD, f"must name the file with the key, or the variable {KEY_PATH_VARIABLE} must")


def _may_be_there(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        # The folder is not readable, so existence is unknown; reading the file reports the error.
        return True
    return True
