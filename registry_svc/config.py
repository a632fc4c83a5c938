"""Everything about the registry that an operator can set."""

import math
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from weft.kernel.errors import invalid_field
from weft.kernel.tls_channel import ChannelSecurity

DAY_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysConfig:
    """Settings with their defaults. A value that makes no sense raises INVALID_ARGUMENT naming the field."""

    pepper_file: Path | None = None
    """What every digest is made with; see `registry_svc.keys.pepper`. None: this registry has no keys."""
    max_keys: int = 10_000
    """How many keys may exist at once. Revoked and expired ones make room for new ones."""
    default_grace_seconds: float = 3_600.0
    """How long the old secret of a rotated key stays good where the caller does not say."""
    max_grace_seconds: float = 30 * DAY_SECONDS
    """Longest that it may."""
    keep_seconds: float = 30 * DAY_SECONDS
    """How long a key stays listed once it was revoked or has expired."""
    revoke_all_if_pepper_lost: bool = False
    """Whether a start with another pepper revokes all keys, which are useless then. Else it is refused."""

    def __post_init__(self) -> None:
        for name in ("max_keys", "default_grace_seconds", "max_grace_seconds", "keep_seconds"):
            value = getattr(self, name)
            if not math.isfinite(value) or value <= 0:
                raise invalid_field(name, "must be a number greater than zero")
        if self.default_grace_seconds > self.max_grace_seconds:
            raise invalid_field("default_grace_seconds", "must not be longer than max_grace_seconds")


class GovernanceMode(IntEnum):
    """What an operation needs; numbers as in `operations.v1.GetGovernanceResponse.Mode`."""

    OFF = 1
    SHARED_KEY = 2
    SIGNATURES = 3


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


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationSettings:
    """Settings with their defaults. A value that makes no sense raises INVALID_ARGUMENT naming the field."""

    max_running: int = 32
    """Operations that are carried out at once; more wait."""
    max_unfinished: int = 1_000
    """Operations that may wait or run; more are refused."""
    keep_seconds: float = 604_800.0
    """How long an operation is kept once it has ended."""
    timeout_seconds: float = 3_600.0
    """Longest time that one operation may take; then it is cancelled, and failed."""
    max_audit_entries: int = 1_000_000
    """Entries of the audit log; at the limit operations are refused."""
    audit_head_interval_seconds: float = 3_600.0
    """How often the end of the audit log is written to the ordinary log."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if not math.isfinite(value) or value <= 0:
                raise invalid_field(name, "must be a number greater than zero")


_LEDGER_MAY_BE_ZERO = frozenset({"device_margin_bytes", "reclaim_wait_seconds", "restart_grace_seconds"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerConfig:
    """Settings with their defaults. A value that makes no sense raises INVALID_ARGUMENT naming the field."""

    lease_time_to_live_seconds: float = 30.0
    """A lease that is not renewed for this long is orphaned; it is over when its memory has been seen back."""
    renew_interval_seconds: float = 5.0
    """How often holders renew their leases and say what they see."""
    watch_interval_seconds: float = 0.25
    """How often they do while somebody waits for memory on their host."""
    device_margin_bytes: int = 512 * 1024 * 1024
    """Memory of each device that is never booked: the driver needs some."""
    reclaim_wait_seconds: float = 2.0
    """How long memory that was given up may take to be seen back before another model is asked to give way."""
    max_wait_seconds: float = 300.0
    """Longest wait for memory."""
    max_leases: int = 10_000
    """Leases that may exist at once, in all of the mesh."""
    max_waiting: int = 256
    """Requests that may wait for memory on one host."""
    orphan_keep_seconds: float = 14_400.0
    """An orphaned lease on a host that nobody sees any more is forgotten after this long."""
    restart_grace_seconds: float = 90.0
    """For this long after a start no lease is orphaned: holders could not reach a registry that was away."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0 or (value == 0 and name not in _LEDGER_MAY_BE_ZERO):
                raise invalid_field(name, "must be a number greater than zero")
        if self.lease_time_to_live_seconds <= self.renew_interval_seconds:
            raise invalid_field("lease_time_to_live_seconds", "must be longer than renew_interval_seconds")


_MAY_BE_ZERO = frozenset({"restart_grace_seconds", "restart_spread_seconds"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryConfig:
    """Settings with their defaults. A value that makes no sense raises INVALID_ARGUMENT naming the field."""

    database_url: str
    """SQLAlchemy URL of an async driver, such as "sqlite+aiosqlite:////var/lib/weft/registry.db"."""
    heartbeat_interval_seconds: float = 30.0
    """How often runners are told to send a sign of life."""
    report_interval_seconds: float = 5.0
    """How often runners are told to report capability."""
    inactive_after_seconds: float = 90.0
    """A runner that was not heard of for this long is inactive."""
    delete_after_seconds: float = 14_400.0
    """A runner that was inactive for this long is forgotten."""
    restart_grace_seconds: float = 90.0
    """For this long after a start nobody expires: runners could not reach a registry that was away."""
    restart_spread_seconds: float = 30.0
    """Expiries that fall due at the end of that grace are spread over this long, each runner at a moment of its own."""
    hibernating_keep_seconds: float = 604_800.0
    """A runner with a model whose host the mesh can wake is forgotten after it was away for this long."""
    max_clock_offset_seconds: float = 300.0
    """A runner whose clock is further from this registry's takes no requests; as long as an operation token lives."""
    sweep_interval_seconds: float = 5.0
    """How often liveness is judged and lazily kept facts are written."""
    heartbeat_save_interval_seconds: float = 60.0
    """How old the stored time of a runner's last heartbeat may become."""
    watch_buffer_responses: int = 1024
    """How many changes may wait for one watcher before it is ended with WATCH_LAGGED."""
    max_waiting_writes: int = 256
    """How many changes may wait to be written; more are refused: heartbeats wait in the same line."""
    max_models_per_session: int = 1024
    """How many models one runner may publish."""
    max_agents_per_session: int = 256
    """How many agents one runner may publish."""
    max_runners: int = 100_000
    """How many runners may be known at once, inactive ones included."""
    max_models: int = 100_000
    """How many models may be known at once, declared or published."""
    max_agents: int = 10_000
    """How many agents may be known at once, declared or published."""
    max_routes: int = 1_000
    """How many routes may be declared at once."""
    max_manifest_bytes: int = 32 * 1024 * 1024
    """How much all models, agents and routes may take: a snapshot of the mesh must fit into one gRPC message."""
    max_detail_bytes: int = 8 * 1024 * 1024
    """How much the words of all capability reports may take together; reports beyond it are kept without words."""
    max_declarations: int = 1_000
    """How many resources one Apply may declare."""
    max_events: int = 1_000
    """How many events are remembered."""
    max_join_tokens: int = 1_000
    """How many join tokens may exist at once, expired ones not counted."""
    allow_cloud_fallback: bool = True
    """What the mesh's setting of this name begins with on a new database; then only operators change it."""

    ledger: LedgerConfig = field(default_factory=LedgerConfig)
    """The book of accelerator memory."""
    operations: OperationSettings = field(default_factory=OperationSettings)
    """Loads, unloads and flushes."""
    governance: GovernanceConfig = field(default_factory=GovernanceConfig)
    """Who may have them done."""
    keys: KeysConfig = field(default_factory=KeysConfig)
    """API keys."""
    security: ChannelSecurity = field(default_factory=ChannelSecurity)
    """What is shown and trusted in calls that leave this machine."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            if not math.isfinite(value) or value < 0 or (value == 0 and name not in _MAY_BE_ZERO):
                raise invalid_field(name, "must be a number greater than zero")
        if self.inactive_after_seconds <= self.heartbeat_interval_seconds:
            raise invalid_field("inactive_after_seconds", "must be longer than heartbeat_interval_seconds")
