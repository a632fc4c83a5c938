"""The sections of the configuration file about the registry's books: memory, operations, who may have them done."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from weft_app.config.config_section import Name, Seconds, Section


class LedgerSection(Section):
    """The book of accelerator memory."""

    lease_time_to_live_seconds: Seconds = 30.0
    """A lease that is not renewed for this long counts as orphaned; it is over when its memory has been seen back."""
    renew_interval_seconds: Seconds = 5.0
    """How often holders renew their leases and say what they see."""
    watch_interval_seconds: Seconds = 0.25
    """How often they do while somebody waits for memory on their host."""
    device_margin_mb: Annotated[int, Field(ge=0, le=1_048_576)] = 512
    """Memory of each device, in MiB, that is never booked: the driver needs some."""
    reclaim_wait_seconds: Annotated[float, Field(ge=0, le=3600)] = 2.0
    """How long memory that was given up may take to be seen back before another model is asked to give way."""
    max_wait_seconds: Seconds = 300.0
    """Longest wait for memory."""
    max_leases: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    """Leases that may exist at once, in all of the mesh."""
    max_waiting: Annotated[int, Field(ge=1, le=100_000)] = 256
    """Requests that may wait for memory on one host."""
    orphan_keep_seconds: Seconds = 14_400.0
    """An orphaned lease on a host that nobody sees any more is forgotten after this long."""


class OperationsSection(Section):
    """Loads, unloads and flushes as durable operations."""

    max_running: Annotated[int, Field(ge=1, le=10_000)] = 32
    """Operations that are carried out at once; more wait."""
    max_unfinished: Annotated[int, Field(ge=1, le=100_000)] = 1_000
    """Operations that may wait or run; more are refused."""
    keep_seconds: Seconds = 604_800.0
    """How long an operation is kept once it has ended."""
    timeout_seconds: Seconds = 3_600.0
    """Longest time that one operation may take; then it is cancelled, and failed."""
    max_audit_entries: Annotated[int, Field(ge=1_000, le=100_000_000)] = 1_000_000
    """Entries of the audit log, which is never cut by itself; at the limit operations are refused."""
    audit_head_interval_seconds: Seconds = 3_600.0
    """How often the end of the audit log is written to the ordinary log, so that a cut shows."""


def _off_is_a_word(value: object) -> object:
    return "off" if value is False else value


class SignerSection(Section):
    """Somebody who may agree to operations."""

    id: Name
    """Key id, such as `alice-2026`."""
    public_key: Annotated[str, Field(max_length=128)] | None = None
    """For signatures: the Ed25519 public key, base64url, as `weft sign new-key` prints it."""
    revoked: bool = False
    """Whether its agreement counts no longer."""


class GovernanceSection(Section):
    """Who may have models loaded and unloaded and caches flushed."""

    mode: Annotated[Literal["off", "shared_key", "signatures"], BeforeValidator(_off_is_a_word)] = "off"
    """Nothing is asked, or a token made with the shared key, or Ed25519 signatures of several signers."""
    key_file: Annotated[Path, Field(strict=False)] | None = None
    """For shared_key: the file with the key, at least 32 bytes. Default: what VERIFIED_OP_TOKEN_KEY_PATH names."""
    signers: tuple[SignerSection, ...] = Field(default=(), max_length=64, strict=False)
    """Who may agree."""
    required_signers: Annotated[int, Field(ge=1, le=64)] = 1
    """How many different ones must."""
    token_lifetime_seconds: Annotated[float, Field(gt=0, le=300)] = 300.0
    """Longest time from issue to expiry of a token; five minutes at most."""
    clock_skew_seconds: Annotated[float, Field(ge=0, le=60)] = 30.0
    """How far the clocks of signers may be off."""
    policy_version: Annotated[str, Field(min_length=1, max_length=64)] = "1"
    """Change it to refuse every token made before."""
    audience: Annotated[str, Field(max_length=128)] | None = None
    """What tokens must be made out to. Default: an id that the registry makes once and keeps."""

    @model_validator(mode="after")
    def _can_be_met(self) -> "GovernanceSection":
        ids = [signer.id for signer in self.signers]
        if len(set(ids)) < len(ids):
            raise ValueError("signers must have ids of their own")
        if self.mode == "signatures" and any(signer.public_key is None for signer in self.signers):
            raise ValueError("every signer needs a public_key where mode is signatures")
        if self.mode != "off" and sum(not signer.revoked for signer in self.signers) < self.required_signers:
            raise ValueError("required_signers is more than there are signers")
        return self


class KeysSection(Section):
    """API keys, see docs/keys.md."""

    pepper_file: Annotated[Path, Field(strict=False)] | None = None
    """What the digests of all keys are made with: 32 bytes that only their owner may read, made on the first start.
    Back it up with the database: without it no key works. Default: `state/key-pepper` under the home."""
    max_keys: Annotated[int, Field(ge=1, le=40_000)] = 10_000
    """Keys that may exist at once. Revoked and expired ones make room for new ones."""
    default_grace_seconds: Seconds = 3_600.0
    """How long the old secret of a rotated key stays good where the caller does not say."""
    max_grace_seconds: Annotated[float, Field(gt=0, le=2_592_000)] = 2_592_000.0
    """Longest that it may."""
    keep_seconds: Seconds = 2_592_000.0
    """How long a key stays listed once it was revoked or has expired."""
    revoke_all_if_pepper_lost: bool = False
    """Whether a start with another pepper revokes all keys, which are useless then. Otherwise it is refused."""

    @model_validator(mode="after")
    def _fits(self) -> "KeysSection":
        if self.default_grace_seconds > self.max_grace_seconds:
            raise ValueError("default_grace_seconds must not be longer than max_grace_seconds")
        return self
