"""The settings of the registry: the section `registry` of weft.yaml, and what the composition adds to it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Le, MaxLen

from weft.kernel.channels.tls_channel import ChannelSecurity
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.settings.setting_annotations import (
    PUBLIC,
    SECRET,
    Before,
    Constant,
    Name,
    PathText,
    Read,
    Seconds,
    SettingError,
    off_for_false,
    require_positive,
)
from weft.kernel.values.names import ascii_name, check_alias
from weft.kernel.values.reach import PLAIN

MEBIBYTE = 1024 * 1024

if TYPE_CHECKING:
    # The settings of a mesh are read without the generated messages.
    from weft.api.registry.v1.tenant_pb2 import TenantManifest
    from weft.documents.resource_kinds import ResourceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysConfig:
    """API keys, see docs/security.md."""

    pepper_file: Annotated[PathText | None, PUBLIC] = None
    """File with the 32-byte secret that is part of the digests of all keys. Only its owner may be able to read it. It
    is created at the first start. Back it up with the database: without it no key works. Default: `state/key-pepper`
    under the home."""
    revoke_all_if_pepper_lost: bool = False
    """Whether to revoke all keys if the pepper is missing or different at startup, as no key works then. If false,
    startup fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretsConfig:
    """Secrets of the mesh, see docs/security.md."""

    key_file: Annotated[PathText | None, PUBLIC] = None
    """File with the keys that encrypt secrets, one per line. Only its owner may be able to read it. It is created with
    the first secret. The first key encrypts, and all of them decrypt: after a start with a new first line, all secrets
    are encrypted with that key. Back it up, but not beside the database. Default: `state/secret-keys` under the
    home."""
    delete_all_if_key_lost: bool = False
    """Whether to delete all secrets if the keys are missing at startup, as no secret can be read then. If false,
    startup fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturesConfig:
    """Captured prompts and answers, see docs/security.md. They are encrypted with the keys of secrets."""

    keep_seconds: Annotated[Seconds, PUBLIC] = 86_400.0
    """How long a prompt and its answer are kept."""
    max_mb: Annotated[int, Ge(1), Le(65_536), PUBLIC] = 256
    """Maximum size of all of them, in MiB; beyond it, the oldest are deleted."""

    def __post_init__(self) -> None:
        require_positive(self)


class GovernanceMode(IntEnum):
    """What authorization an operation needs; numbers as in `operations.v1.GetGovernanceResponse.Mode`."""

    OFF = 1
    SHARED_KEY = 2
    SIGNATURES = 3


Mode = Annotated[
    GovernanceMode,
    Read(
        Annotated[Literal["off", "shared_key", "signatures"], Before(off_for_false)],
        lambda word: GovernanceMode[word.upper()],
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signer:
    """A person or program that may sign operations."""

    id: Name
    """Name of the signer in tokens, such as `alice`."""
    revoked: bool = False
    """Whether the signer is revoked, so that it no longer counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GovernanceSettings:
    """Authorization of loads, unloads and cache flushes."""

    mode: Annotated[Mode, PUBLIC] = GovernanceMode.OFF
    """What an operation needs. `off`: no token. `shared_key`: a token made with the shared key. `signatures` was
    removed: every operation is refused."""
    key_file: Annotated[PathText | None, PUBLIC] = None
    """With `shared_key`: file with the key, at least 32 bytes. Default: the path in the environment variable
    VERIFIED_OP_TOKEN_KEY_PATH."""
    signers: Annotated[tuple[Signer, ...], MaxLen(64), PUBLIC] = ()
    """People and programs that may sign operations."""
    required_signers: Annotated[int, Ge(1), Le(64), PUBLIC] = 1
    """Number of different signers that a token must name."""

    def __post_init__(self) -> None:
        ids = [signer.id for signer in self.signers]
        if len(set(ids)) < len(ids):
            raise ValueError("signers must have their own ids")
        if self.mode is GovernanceMode.SHARED_KEY:
            active = sum(not signer.revoked for signer in self.signers)
            if active < self.required_signers:
                raise ValueError("required_signers is more than there are signers")


@dataclass(frozen=True, slots=True, kw_only=True)
class GovernanceConfig(GovernanceSettings):
    """Governance settings with the key. `build_gate` checks that they fit together."""

    token_lifetime_seconds: float = 300.0
    """Lifetime of a token."""
    clock_skew_seconds: float = 30.0
    """How far the clocks of signers may be ahead of the registry's."""
    shared_key: bytes = field(default=b"", repr=False)
    """At least 32 bytes, if the mode requires a key."""

    def __post_init__(self) -> None:
        """Leaves the checks to `build_gate`, which names the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationLimits:
    """Loads, unloads and flushes as durable operations. An invalid value raises INVALID_ARGUMENT."""

    max_audit_entries: Annotated[int, Ge(1_000), Le(100_000_000)] = 1_000_000
    """Maximum number of entries of the audit log, which is never truncated automatically. At the limit, operations are
    refused."""
    keep_seconds: Constant[float] = 604_800.0
    """How long a finished operation is kept."""
    timeout_seconds: Constant[float] = 3_600.0
    """Longest time that one operation may take; then it is cancelled, and failed."""
    max_running: Constant[int] = 32
    """Maximum number of concurrent operations; further ones wait."""
    max_unfinished: Constant[int] = 1_000
    """Maximum number of unfinished operations; further ones are refused."""

    def __post_init__(self) -> None:
        require_positive(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerConfig:
    """The VRAM ledger: leases of accelerator memory."""

    lease_time_to_live_seconds: Constant[float] = 30.0
    """Time without a renewal after which a lease is orphaned; it ends when its memory is observed to be free."""
    renew_interval_seconds: Constant[float] = 5.0
    """How often holders renew their leases and report what they observe."""
    device_margin_mb: Annotated[int, Ge(0), Le(1_048_576), PUBLIC] = 512
    """Memory of each device, in MiB, that is never leased, because the driver needs some."""
    max_wait_seconds: Constant[float] = 300.0
    """Longest wait for memory."""
    max_leases: Constant[int] = 10_000
    """Maximum number of leases in the mesh."""
    watch_interval_seconds: Constant[float] = 0.25
    """How often holders report while a request waits for memory on their host."""
    reclaim_wait_seconds: Constant[float] = 2.0
    """How long released memory may take to be observed as free before another model is evicted."""
    max_waiting: Constant[int] = 256
    """Maximum number of requests that wait for memory on one host."""
    orphan_keep_seconds: Constant[float] = 14_400.0
    """Time after which an orphaned lease on a host that no runner observes is deleted."""
    restart_grace_seconds: Constant[float] = 90.0
    """Time after a start during which no lease is orphaned, because holders could not reach the registry before."""

    def __post_init__(self) -> None:
        require_positive(
            self, may_be_zero=frozenset({"device_margin_mb", "reclaim_wait_seconds", "restart_grace_seconds"})
        )
        if self.lease_time_to_live_seconds <= self.renew_interval_seconds:
            raise SettingError("lease_time_to_live_seconds", "must be longer than renew_interval_seconds")

    @property
    def device_margin_bytes(self) -> int:
        """Memory of each device that is never leased."""
        return self.device_margin_mb * MEBIBYTE


@dataclass(frozen=True, slots=True, kw_only=True)
class AliasSetting:
    """Another name of a model, like a declared alias; see docs/scheduling.md."""

    name: Name
    """Name of the alias."""
    target: Annotated[str, MaxLen(192)]
    """What answers requests for the alias: a model or a pool, `agent/NAME` or `route/NAME`."""
    pattern: Annotated[str, MaxLen(128)] = ""
    """Model names that the alias matches: one name, or a prefix and `*`, such as `claude-*`. Default: the name of the
    alias."""
    tenant: Annotated[str, MaxLen(64)] = ""
    """Tenant for which the alias applies. Default: all tenants."""
    description: Annotated[str, MaxLen(1024)] = ""
    """Description for people."""
    default_params: Annotated[Mapping[str, Any], MaxLen(64), PLAIN, PUBLIC] = field(default_factory=dict)
    """Parameters for requests that do not set them, such as `temperature: 0.2`."""
    forced_params: Annotated[Mapping[str, Any], MaxLen(64), PLAIN, PUBLIC] = field(default_factory=dict)
    """Parameters that replace those of requests."""
    removed_params: Annotated[tuple[Name, ...], MaxLen(16), PUBLIC] = ()
    """Parameters of requests that are removed, by name."""

    def __post_init__(self) -> None:
        try:
            check_alias(self.name, self.pattern, ascii_name(self.target), self.tenant)
            if self.default_params or self.forced_params or self.removed_params:
                self._check_preset()
        except FieldError as error:
            raise SettingError(error.field, error.message.removeprefix(f"{error.field}: ")) from None

    def _check_preset(self) -> None:
        # Most meshes have none, and are read without the generated messages.
        from weft.api.registry.v1.alias_pb2 import AliasManifest  # noqa: PLC0415
        from weft.dispatch.declared_presets import check_preset, preset_of  # noqa: PLC0415

        check_preset(AliasManifest(**preset_of(self)))


MAX_ALIASES = 256
MAX_DECLARED = 1_000
"""Maximum number of documents of a kind that has no setting for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrySettings:
    """The registry: runners and their heartbeats, declarations, VRAM ledger, operations and keys."""

    database_url: Annotated[str | None, PUBLIC, SECRET] = field(default=None, repr=False)
    """Database of the registry. Default: a SQLite file under the home. PostgreSQL:
    `postgresql://user:password@host/database` (TLS: `?sslmode=require`; Unix socket: `?host=/folder`); it needs `pip
    install "psycopg[binary]"` beside weft, and a connection without a transaction-pooling proxy."""
    owner_silence_seconds: Annotated[float, Ge(1), Le(3_600), PUBLIC] = 10.0
    """On PostgreSQL: time without a heartbeat of the registry that owns the database, after which its standby ends the
    owner's connection and takes over."""
    heartbeat_interval_seconds: Seconds = 30.0
    """How often runners send a heartbeat."""
    report_interval_seconds: Seconds = 5.0
    """How often runners report the state of their models."""
    inactive_after_seconds: Annotated[Seconds, PUBLIC] = 90.0
    """Time without a heartbeat after which a runner is inactive."""
    restart_grace_seconds: Seconds = 90.0
    """Time after a start of the registry during which no runner expires, because runners could not reach it before."""
    allow_cloud_fallback: Annotated[bool | None, PUBLIC] = None
    """Whether routes may fall back to remote models. It applies to a new database only; use `weft config set` to change
    it later. Default: the environment variable WEFT_ALLOW_CLOUD_FALLBACK, else true."""
    aliases: Annotated[tuple[AliasSetting, ...], MaxLen(MAX_ALIASES), PUBLIC] = ()
    """Aliases of models. An alias that is declared with `weft apply` takes precedence over one with the same name or
    pattern here."""
    ledger: LedgerConfig = field(default_factory=LedgerConfig)
    """The VRAM ledger: leases of accelerator memory."""
    operations: OperationLimits = field(default_factory=OperationLimits)
    """Loads, unloads and flushes."""
    governance: GovernanceSettings = field(default_factory=GovernanceSettings)
    """Who may load and unload models and flush caches."""
    keys: KeysConfig = field(default_factory=KeysConfig)
    """API keys."""
    secrets: SecretsConfig = field(default_factory=SecretsConfig)
    """Secrets, such as the API keys of providers."""
    captures: CapturesConfig = field(default_factory=CapturesConfig)
    """Captured prompts and answers."""

    def max_of(self, kind: "ResourceKind") -> int:
        """Returns the maximum number of resources of a kind."""
        return int(getattr(self, f"max_{kind.plural}", MAX_DECLARED))

    def __post_init__(self) -> None:
        require_positive(self, may_be_zero=frozenset({"restart_grace_seconds", "restart_spread_seconds"}))
        if self.inactive_after_seconds <= self.heartbeat_interval_seconds:
            raise SettingError("inactive_after_seconds", "must be longer than heartbeat_interval_seconds")
        for what in ("name", "pattern"):
            given = [
                (each.tenant if what == "pattern" else "", getattr(each, what) or each.name) for each in self.aliases
            ]
            if len(set(given)) < len(given):
                raise SettingError("aliases", f"each must have its own {what}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryConfig(RegistrySettings):
    """The registry. An invalid value raises INVALID_ARGUMENT naming the field."""

    delete_after_seconds: float = 14_400.0
    """Inactivity after which a runner is deleted."""
    max_clock_offset_seconds: float = 300.0
    """A runner with a larger clock offset from the registry gets no requests. Not for runners that join over a relay.
    The default is the lifetime of an operation token."""
    restart_spread_seconds: float = 30.0
    """Expiries at the end of the restart grace are spread over this time."""
    hibernating_keep_seconds: float = 604_800.0
    """A model on a host that the mesh can wake is deleted after its runner was away for this long."""
    router_beat_interval_seconds: float = 2.0
    """Interval of router heartbeats."""
    router_session_seconds: float = 10.0
    """Time without a heartbeat after which a router is deleted."""
    database_url: str | Path  # type: ignore[assignment]  # settings have no path
    """The file of a SQLite database, or a URL such as "postgresql://user@host/weft"."""
    address: str = ""
    """Where it serves: a standby refers callers to the owner's address."""
    allow_cloud_fallback: bool = True
    """The mesh's setting of this name on a new database; later only operators change it."""
    governance: GovernanceConfig = field(default_factory=GovernanceConfig)
    sweep_interval_seconds: float = 5.0
    """Interval at which liveness is checked and lazily stored facts are written."""
    heartbeat_save_interval_seconds: float = 60.0
    """Maximum age of the stored time of a runner's last heartbeat."""
    watch_buffer_responses: int = 1024
    """Maximum number of unread changes of a watcher; beyond it, the watch ends with WATCH_LAGGED."""
    max_waiting_writes: int = 256
    """Maximum number of queued writes; further ones are refused, because heartbeats wait in the same queue."""
    max_models_per_session: int = 1024
    """Maximum number of models that one runner publishes."""
    max_agents_per_session: int = 256
    """Maximum number of agents that one runner publishes."""
    max_runners: int = 100_000
    """Maximum number of known runners, inactive ones included."""
    max_routers: int = 64
    """Maximum number of known routers."""
    max_models: int = 100_000
    """Maximum number of known models, declared or published."""
    max_agents: int = 10_000
    """Maximum number of known agents, declared or published."""
    max_routes: int = 1_000
    """Maximum number of declared routes."""
    max_aliases: int = MAX_ALIASES
    """Maximum number of declared aliases."""
    max_workflows: int = 256
    """Maximum number of declared workflows."""
    max_trials: int = 100
    """Maximum number of declared trials."""
    max_tenants: int = 10_000
    """Maximum number of declared tenants."""
    tenants: "tuple[TenantManifest, ...]" = ()
    """Tenants of weft.yaml, shown unless a tenant with the same name is declared."""
    kinds_off: Mapping[str, str] = field(default_factory=dict)
    """Why kinds of declarations are refused, and stored ones not used, by kind."""
    configured_names: frozenset[str] = frozenset()
    """Names of runners, models, pools and agents of weft.yaml, which no joined machine gets."""
    max_manifest_bytes: int = 32 * 1024 * 1024
    """Maximum size of all declarations and publications: a snapshot of the mesh must fit into one gRPC message."""
    max_detail_bytes: int = 8 * 1024 * 1024
    """Maximum total size of the texts of all capability reports; further reports are stored without texts."""
    max_declarations: int = 1_000
    """Maximum number of resources that one Apply declares."""
    max_events: int = 1_000
    """Maximum number of stored events, which survive restarts."""
    max_join_tokens: int = 1_000
    """Maximum number of join tokens that have not expired, and machines that joined."""
    security: ChannelSecurity = field(default_factory=ChannelSecurity)
    """TLS credentials and trust for calls that leave this machine."""
