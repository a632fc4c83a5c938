"""Configurations of gateway, router and registry, without their services: `weft doctor` checks them and starts none."""

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from gateway.gateway_config import EdgeTls, GatewayConfig
from gateway.server_tools.permission import RemoteRules
from registry_svc.registry_config import (
    GovernanceConfig,
    GovernanceMode,
    GovernanceSettings,
    RegistryConfig,
    RegistrySettings,
)
from router_svc.client_registry import ClientsConfig
from router_svc.policy.limits import QueueLimits, SchedulerLimits
from router_svc.policy.pool_settings import RateLimitConfig, RemotePermission, TenantRates, TenantSettings
from router_svc.registry_session import default_router_name
from router_svc.router_config import RelayConfig, RouterConfig
from router_svc.router_settings import RouterSettings
from weft.api.registry.v1 import journal_pb2
from weft.api.registry.v1 import tenant_pb2 as pb
from weft.extension import kinds_off
from weft.kernel.channels.outbound import Outbound, listeners_of
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.requests.request_values import journal_mode_of
from weft.kernel.settings.setting_annotations import values_of
from weft.kernel.values.units import DAY, HOUR, MINUTE, MONTH, SECOND, WEEK, Rate, RateUnit
from weft.signing.tokens import read_shared_key
from weft_app.compose.environment import DEFAULT_RATES, KEY_PATH_VARIABLE, allow_cloud_fallback
from weft_app.compose.home import WeftHome
from weft_app.compose.journal import journal_rules
from weft_app.compose.security import channel_security, keys_required
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


def remote_rules(section: RouterSettings) -> RemoteRules:
    """Returns whose requests may leave the mesh, by the configuration."""
    return RemoteRules(
        default=_PERMISSIONS[section.default_tenant.allow_remote],
        tenants={tenant.name: tenant.allow_remote for tenant in configured_tenants(section)},
    )


def _tenant(name: str, settings: TenantSettings, rates: Sequence[Rate] | None) -> pb.TenantManifest:
    return pb.TenantManifest(
        name=name,
        weight=None if settings.weight == 1.0 else settings.weight,
        max_in_flight=settings.max_in_flight,
        allow_remote=_PERMISSIONS[settings.allow_remote],
        max_priority=settings.max_priority.as_ceiling,  # type: ignore[arg-type]  # same numbers
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
        "governance": governance_config(section.governance),
        "keys": replace(section.keys, pepper_file=section.keys.pepper_file or home.state / "key-pepper"),
        "secrets": replace(section.secrets, key_file=section.secrets.key_file or home.state / "secret-keys"),
    }
    return RegistryConfig(
        **values,
        tenants=configured_tenants(config.router),
        kinds_off=kinds_off(config.extensions.disabled),
        configured_names=frozenset(_configured_names(config)),
        security=channel_security(config),
    )


def _configured_names(config: WeftConfig) -> Iterator[str]:
    for runner in config.runners or ():
        yield runner.name
        yield from (agent.name for agent in runner.agents)
        for model in runner.models:
            yield model.name
            if model.pool:
                yield model.pool


DEFAULT_KEY_PATH = Path("/etc/safebox/model-api.key")

_KEY_FIELD = "registry.governance.key_file"


def governance_config(
    section: GovernanceSettings,
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
    return GovernanceConfig(**values_of(GovernanceSettings, section), shared_key=key)


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
        outbound=Outbound(own_listeners=partial(listeners_of, os.getpid())),
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


def gateway_config(config: WeftConfig) -> GatewayConfig:
    """Returns the configuration of the HTTP edge."""
    return replace(config.gateway, host=config.host, port=config.port, auth_required=keys_required(config))


def gateway_config_behind_edge(config: WeftConfig) -> GatewayConfig:
    """Returns the configuration of the gateway, on loopback if `weft up` has a proxy at the public address."""
    outer = gateway_config(config)
    if config.edge.proxy == "none":
        return outer
    return replace(
        outer,
        host="127.0.0.1",
        port=0,
        tls=EdgeTls(authority_file=outer.tls.authority_file),
        allowed_hosts=outer.allowed_hosts | {config.host.lower()},
        public_scheme="https" if outer.tls.is_set else "http",
    )
