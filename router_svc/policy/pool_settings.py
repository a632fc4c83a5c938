"""The settings of pools, tenants and clients."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, MaxLen

from router_svc.policy.cooldown import CooldownRule
from weft.kernel.requests.request_values import JournalWord, Priority
from weft.kernel.settings.setting_annotations import PUBLIC, Checked, ModelName, Name, Rates, Read, Seconds
from weft.kernel.values.names import MAX_CLIENT_CHARS, MAX_TENANT_CHARS, is_token
from weft.kernel.values.units import Rate


class ChoicePolicy(Enum):
    """How one of several free candidates of a pool is chosen."""

    FIRST_TOKEN = "first_token"  # noqa: S105 - no password
    """The one with the lowest expected time to the first token."""
    LEAST_LOADED = "least_loaded"
    RANDOM = "random"
    ROUND_ROBIN = "round_robin"

    @classmethod
    def _missing_(cls, value: object) -> "ChoicePolicy | None":
        """Maps the earlier name `prefix_affinity` to `first_token`, which includes it."""
        return cls.FIRST_TOKEN if value == "prefix_affinity" else None


class RemotePermission(Enum):
    """Whether a tenant's requests may be sent to a remote provider."""

    NEVER = "never"
    ON_REQUEST = "on_request"
    """If the request allows it."""
    ALWAYS = "always"


def _token(text: str, max_chars: int) -> str:
    if not is_token(text, max_chars):
        raise ValueError(f"must be 1 to {max_chars} letters, digits or '._:@/+=-', starting with a letter or digit")
    return text


TenantName = Annotated[str, Checked(lambda text: _token(text, MAX_TENANT_CHARS))]
ClientName = Annotated[str, Checked(lambda text: _token(text, MAX_CLIENT_CHARS))]
ClientPriority = Annotated[Priority, Read(Literal["high", "normal", "low"], lambda name: Priority[name.upper()])]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """Settings of one pool: how a model is chosen and how many requests may run."""

    policy: ChoicePolicy = ChoicePolicy.FIRST_TOKEN
    """How a model of the pool is chosen. `first_token`: the one with the lowest expected time to first token, estimated
    from its queue, speed and cached prefixes; or `least_loaded`, `random`, `round_robin`."""
    max_in_flight: Annotated[int, Ge(0), Le(1_000_000)] = 0
    """Maximum number of running requests in the pool. 0: as many as its models have slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSettings:
    """One tenant."""

    weight: Annotated[float, Gt(0), Le(1000)] = 1.0
    """Share of scarce capacity, relative to other tenants."""
    max_in_flight: Annotated[int, Ge(0), Le(1_000_000)] = 0
    """Maximum number of running requests of the tenant; further ones wait. 0: no limit."""
    allow_remote: RemotePermission = RemotePermission.ON_REQUEST
    """Whether the tenant's requests may be sent to a remote provider: `never`, `always`, or `on_request` if the request
    has `allow_remote`."""
    max_priority: ClientPriority = Priority.HIGH
    """Highest priority class of the tenant's requests: one that asks for more waits in this class."""
    journal: JournalWord | None = None
    """Whether the tenant's requests are durable tasks by default. `wait`: while their callers wait; `keep`: also after
    a caller has disconnected; `none`: they are not. The model's setting takes precedence. `weft serve gateway` reads
    this setting too. Default: the setting of the mesh."""

    def permits_remote(self, *, requested: bool) -> bool:
        """Whether its request may be sent to a remote provider; `requested`: the request itself allows it."""
        match self.allow_remote:
            case RemotePermission.NEVER:
                return False
            case RemotePermission.ON_REQUEST:
                return requested
            case RemotePermission.ALWAYS:
                return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Pools and tenants; those that are not named have the default."""

    default_pool: PoolSettings = field(default_factory=PoolSettings)
    """Settings of pools that are not in `pools`."""
    pools: Annotated[Mapping[ModelName, PoolSettings], MaxLen(10_000), PUBLIC] = field(default_factory=dict)
    """Settings by pool, or by model if a model has no pool."""
    default_tenant: TenantSettings = field(default_factory=TenantSettings)
    """Settings of tenants that are not in `tenants`."""
    tenants: Annotated[Mapping[TenantName, TenantSettings], MaxLen(10_000), PUBLIC] = field(default_factory=dict)
    """Settings by tenant (X-Tenant-ID)."""

    def pool(self, name: str) -> PoolSettings:
        """Returns the settings of a pool."""
        return self.pools.get(name, self.default_pool)

    def tenant(self, name: str) -> TenantSettings:
        """Returns the settings of a tenant."""
        return self.tenants.get(name, self.default_tenant)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientProfile:
    """Settings of one client, identified by the header X-Client-Id or the field `x_client_id`."""

    priority: ClientPriority = Priority.NORMAL
    """Priority of requests that do not set one."""
    route: Name | None = None
    """Route that answers the client's requests for the model `auto`. Default: none, and the model `auto` does not exist
    for this client."""
    rates: Rates = ()
    """Rate limits of the client, counted separately in each tenant, such as `[10req/min]`. Default: only the limits of
    the tenant."""
    cooldown_after_refusals: Annotated[int, Ge(0), Le(10_000)] = 10
    """Number of consecutive rate limit refusals after which the client is refused for a cooldown. 0: no cooldown."""
    cooldown_seconds: Seconds = 10.0
    """Length of the first cooldown; doubles with each further one, up to `max_cooldown_seconds`."""
    max_cooldown_seconds: Seconds = 300.0
    """Maximum length of a cooldown."""

    def __post_init__(self) -> None:
        if self.max_cooldown_seconds < self.cooldown_seconds:
            raise ValueError("max_cooldown_seconds must not be less than cooldown_seconds")

    @property
    def cooldown(self) -> CooldownRule:
        """The cooldown after repeated refusals, and its length."""
        return CooldownRule(
            after_refusals=self.cooldown_after_refusals,
            seconds=self.cooldown_seconds,
            max_seconds=self.max_cooldown_seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantRates:
    """Rate limits of tenants over HTTP and gRPC, checked before a request is queued."""

    default: Annotated[Rates | None, PUBLIC] = None
    """Limits of each tenant that is not in `tenants`, such as `[50req/min, 20000tok/min]` (or `/sec`, `/hour`, `/day`,
    `/week`, `/month`). Prompt tokens are estimated first and corrected when the answer is complete. Default:
    `[50req/min]` if `multi_tenant` is on, else none."""
    tenants: Annotated[Mapping[TenantName, Rates], MaxLen(10_000), PUBLIC] = field(default_factory=dict)
    """Limits by tenant (X-Tenant-ID)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimitConfig(TenantRates):
    """Rates per tenant with every default resolved; empty: no limit."""

    spared_for_callers_percent: float = 20.0
    """Part of each window that durable work leaves to live requests: tasks, items of batches and journaled requests
    wait when no more than this is left. 100: they are not started while anything of the window is used."""
    max_tenants: int = 1000
    """Tenants that are counted one by one besides those that are named; those beyond share one window."""
    max_subjects: int = 1000
    """Keys or models that a tenant's limit per key or per model counts one by one; those beyond share one window."""
    default: tuple[Rate, ...] = ()
