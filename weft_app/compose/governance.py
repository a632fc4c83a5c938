"""How governance is set up: the section of the configuration, the shared key, and the witness under the home."""

import os
from collections.abc import Mapping
from pathlib import Path

from registry_svc.config import GovernanceConfig, GovernanceMode, Signer
from weft.kernel.errors import invalid_field
from weft.signing.op_token import read_shared_key
from weft_app.compose.home import WeftHome
from weft_app.config.registry_sections import GovernanceSection

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
