"""How the registry is set up and run. The only module besides `up` that imports it."""

import os

import registry_svc.service
from registry_svc.config import KeysConfig, LedgerConfig, OperationSettings, RegistryConfig
from weft.kernel.clock import SystemClock
from weft_app.compose.auth import key_check
from weft_app.compose.governance import governance_config
from weft_app.compose.home import WeftHome
from weft_app.compose.registry_environment import allow_cloud_fallback
from weft_app.compose.serving import Announce, serve_until_stopped
from weft_app.compose.tls import channel_security, new_host
from weft_app.config.config import WeftConfig
from weft_app.config.registry_sections import KeysSection, LedgerSection, OperationsSection

MEBIBYTE = 1024 * 1024


def registry_config(config: WeftConfig, home: WeftHome) -> RegistryConfig:
    """The registry on its database under the home."""
    section = config.registry
    return RegistryConfig(
        database_url=section.database_url or f"sqlite+aiosqlite:///{home.state / 'registry.db'}",
        heartbeat_interval_seconds=section.heartbeat_interval_seconds,
        report_interval_seconds=section.report_interval_seconds,
        max_clock_offset_seconds=section.max_clock_offset_seconds,
        inactive_after_seconds=section.inactive_after_seconds,
        delete_after_seconds=section.delete_after_seconds,
        restart_grace_seconds=section.restart_grace_seconds,
        restart_spread_seconds=section.restart_spread_seconds,
        hibernating_keep_seconds=section.hibernating_keep_seconds,
        allow_cloud_fallback=allow_cloud_fallback(section.allow_cloud_fallback, os.environ),
        ledger=_ledger_config(section.ledger, section.restart_grace_seconds),
        operations=_operation_settings(section.operations),
        governance=governance_config(section.governance, home),
        keys=_keys_config(section.keys, home),
        security=channel_security(config),
    )


def _ledger_config(section: LedgerSection, restart_grace_seconds: float) -> LedgerConfig:
    return LedgerConfig(
        lease_time_to_live_seconds=section.lease_time_to_live_seconds,
        renew_interval_seconds=section.renew_interval_seconds,
        watch_interval_seconds=section.watch_interval_seconds,
        device_margin_bytes=section.device_margin_mb * MEBIBYTE,
        reclaim_wait_seconds=section.reclaim_wait_seconds,
        max_wait_seconds=section.max_wait_seconds,
        max_leases=section.max_leases,
        max_waiting=section.max_waiting,
        orphan_keep_seconds=section.orphan_keep_seconds,
        restart_grace_seconds=restart_grace_seconds,
    )


def _operation_settings(section: OperationsSection) -> OperationSettings:
    return OperationSettings(
        max_running=section.max_running,
        max_unfinished=section.max_unfinished,
        keep_seconds=section.keep_seconds,
        timeout_seconds=section.timeout_seconds,
        max_audit_entries=section.max_audit_entries,
        audit_head_interval_seconds=section.audit_head_interval_seconds,
    )


def _keys_config(section: KeysSection, home: WeftHome) -> KeysConfig:
    return KeysConfig(
        pepper_file=section.pepper_file or home.state / "key-pepper",
        max_keys=section.max_keys,
        default_grace_seconds=section.default_grace_seconds,
        max_grace_seconds=section.max_grace_seconds,
        keep_seconds=section.keep_seconds,
        revoke_all_if_pepper_lost=section.revoke_all_if_pepper_lost,
    )


async def serve_registry(config: WeftConfig, home: WeftHome, listen: str | None, announce: Announce) -> None:
    """The registry until a signal comes."""
    keys = key_check(config, SystemClock())
    host = new_host(config, "registry", keys)
    address = host.bind(listen or home.address("registry"))
    service = registry_svc.service.build(registry_config(config, home))
    if keys is not None:
        keys.use(lambda: service.key_ring)
    await serve_until_stopped(host, service, config, lambda: announce(address))
