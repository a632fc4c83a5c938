"""What governance is set up with."""

from dataclasses import dataclass, field
from pathlib import Path

from registry_svc.operations.gatekeeper import GovernanceMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Signer:
    """Somebody who may agree to operations."""

    id: str
    public_key: str = ""
    """Ed25519, base64url; empty where a shared key is used."""
    revoked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GovernanceConfig:
    """Who may have operations done. `build_gate` says what does not fit together."""

    mode: GovernanceMode = GovernanceMode.OFF
    signers: tuple[Signer, ...] = ()
    required_signers: int = 1
    """How many different ones must agree."""
    shared_key: bytes = field(default=b"", repr=False)
    """At least 32 bytes, where the mode asks for one."""
    token_lifetime_seconds: float = 300.0
    """Longest time from issue to expiry."""
    clock_skew_seconds: float = 30.0
    """How far signers' clocks may be ahead of the registry's."""
    policy_version: str = "1"
    """What signers must name; another one refuses every token made before."""
    audience: str = ""
    """What tokens must be made out to; empty: the id that the registry made for itself."""
    witness_file: Path | None = None
    """Where the newest issue time is kept outside of the database. None: after every start, tokens from before it are
    refused."""
