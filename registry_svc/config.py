"""Everything about the registry that an operator can set."""

import math
from dataclasses import dataclass, field

from registry_svc.governance.config import GovernanceConfig
from registry_svc.keys.config import KeysConfig
from registry_svc.ledger.config import LedgerConfig
from registry_svc.operations.settings import OperationSettings
from weft.kernel.errors import invalid_field
from weft.kernel.tls_channel import ChannelSecurity

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
