"""How the registry is set up and run. The only module besides `up` that imports it."""

import os
from collections.abc import Mapping
from pathlib import Path

import registry_svc.service
from registry_svc.config import (
    GovernanceConfig,
    GovernanceMode,
    KeysConfig,
    LedgerConfig,
    OperationSettings,
    RegistryConfig,
    Signer,
)
from weft.kernel.clock import SystemClock
from weft.kernel.errors import invalid_field
from weft.signing.tokens import read_shared_key
from weft_app.compose.auth import key_check
from weft_app.compose.home import WeftHome
from weft_app.compose.serving import Announce, serve_until_stopped
from weft_app.compose.tls import channel_security, new_host
from weft_app.config.config import WeftConfig
from weft_app.config.registry_sections import GovernanceSection, KeysSection, LedgerSection, OperationsSection

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


CLOUD_FALLBACK_VARIABLE = "WEFT_ALLOW_CLOUD_FALLBACK"
_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def allow_cloud_fallback(configured: bool | None, environment: Mapping[str, str]) -> bool:
    """Whether routes may fall back to models off the premises until an operator says otherwise.

    `configured` is what weft.yaml says, None for nothing. Raises INVALID_ARGUMENT naming the variable.
    """
    if configured is not None:
        return configured
    word = environment.get(CLOUD_FALLBACK_VARIABLE, "").strip().lower()
    if not word:
        return True
    if word not in _WORDS:
        raise invalid_field(CLOUD_FALLBACK_VARIABLE, "must be true or false")
    return _WORDS[word]


KEY_PATH_VARIABLE = "VERIFIED_OP_TOKEN_KEY_PATH"
DEFAULT_KEY_PATH = Path("/etc/safebox/model-api.key")
WITNESS_NAME = "governance-witness.json"

_KEY_FIELD = "registry.governance.key_file"
_MODES: Mapping[str, GovernanceMode] = {
    "off": GovernanceMode.OFF,
    "shared_key": GovernanceMode.SHARED_KEY,
    "signatures": GovernanceMode.SIGNATURES,
}


def governance_config(
    section: GovernanceSection,
    home: WeftHome,
    *,
    environment: Mapping[str, str] | None = None,
    default_key_path: Path = DEFAULT_KEY_PATH,
) -> GovernanceConfig:
    """What the registry's gate is built from. `environment` defaults to this process's.

    Raises INVALID_ARGUMENT when a shared key is asked for and there is none that is good.
    """
    mode = _MODES[section.mode]
    key = b""
    if mode is GovernanceMode.SHARED_KEY:
        key = _shared_key(section, os.environ if environment is None else environment, default_key_path)
    return GovernanceConfig(
        mode=mode,
        signers=tuple(
            Signer(id=signer.id, public_key=signer.public_key or "", revoked=signer.revoked)
            for signer in section.signers
        ),
        required_signers=section.required_signers,
        shared_key=key,
        token_lifetime_seconds=section.token_lifetime_seconds,
        clock_skew_seconds=section.clock_skew_seconds,
        policy_version=section.policy_version,
        audience=section.audience or "",
        witness_file=home.state / WITNESS_NAME,
    )


def _shared_key(section: GovernanceSection, environment: Mapping[str, str], default: Path) -> bytes:
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
        return path.exists()
    except OSError:
        # In a folder of somebody else not even that can be asked; reading it says why.
        return True
