"""The settings of pools, tenants and clients."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, MaxLen

from router_svc.policy.cooldown import CooldownRule
from weft.kernel.names import MAX_CLIENT_CHARS, MAX_TENANT_CHARS, is_token
from weft.kernel.request import JournalWord, Priority
from weft.kernel.settings import PUBLIC, Checked, ModelName, Name, Rates, Read, Seconds
from weft.kernel.units import Rate


class ChoicePolicy(Enum):
    """How one of several free candidates of a pool is chosen."""

    FIRST_TOKEN = "first_token"  # noqa: S105 - no password
    """The one with the lowest expected time to the first token."""
    LEAST_LOADED = "least_loaded"
    RANDOM = "random"
    ROUND_ROBIN = "round_robin"

    @classmethod
    def _missing_(cls, value: object) -> "ChoicePolicy | None":
        """Take `prefix_affinity`, of which `first_token` does more."""
        return cls.FIRST_TOKEN if value == "prefix_affinity" else None


class RemotePermission(Enum):
    """Whether a tenant's requests may be sent to a remote provider."""

    NEVER = "never"
    ON_REQUEST = "on_request"
    """Where the request itself allows it."""
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
    """One pool: how one of its free models is chosen, and how much may run on them."""

    policy: ChoicePolicy = ChoicePolicy.FIRST_TOKEN
    """`first_token`: the model with the lowest expected time to the first token, by its queue, its speed and its cached
    prefixes; `least_loaded`, `random`, or `round_robin`."""
    max_in_flight: Annotated[int, Ge(0), Le(1_000_000)] = 0
    """Requests that may run on its models concurrently. 0: as many as they have slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSettings:
    """One tenant."""

    weight: Annotated[float, Gt(0), Le(1000)] = 1.0
    """Its share of scarce capacity, relative to the other tenants'."""
    max_in_flight: Annotated[int, Ge(0), Le(1_000_000)] = 0
    """Its requests that may run concurrently; more wait. 0: no limit."""
    allow_remote: RemotePermission = RemotePermission.ON_REQUEST
    """Whether its requests may be sent to a remote provider: `on_request` where a request itself has `allow_remote`."""
    journal: JournalWord | None = None
    """Whether its requests are durable tasks without asking for it: `wait`, while their callers wait; `keep`, and also
    when a caller has disconnected; `none`. A model's own setting counts first. `weft serve gateway` reads it too.
    Default: as the mesh's setting."""

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
    """Pools that are not named in `pools`."""
    pools: Annotated[Mapping[ModelName, PoolSettings], MaxLen(10_000), PUBLIC] = field(default_factory=dict)
    """By pool, or by model for a model without one."""
    default_tenant: TenantSettings = field(default_factory=TenantSettings)
    """Tenants that are not named in `tenants`."""
    tenants: Annotated[Mapping[TenantName, TenantSettings], MaxLen(10_000), PUBLIC] = field(default_factory=dict)
    """By tenant, as in X-Tenant-ID."""

    def pool(self, name: str) -> PoolSettings:
        """Returns the settings of a pool."""
        return self.pools.get(name, self.default_pool)

    def tenant(self, name: str) -> TenantSettings:
        """Returns the settings of a tenant."""
        return self.tenants.get(name, self.default_tenant)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientProfile:
    """One client, by the id in X-Client-Id or `x_client_id`."""

    priority: ClientPriority = Priority.NORMAL
    """Priority of its requests that name none."""
    route: Name | None = None
    """Where its requests for the model `auto` go. Default: there is no such model for it."""
    rates: Rates = ()
    """Its rate limit, in each tenant on its own, such as `[10req/min]`. Default: its tenant's alone."""
    cooldown_after_refusals: Annotated[int, Ge(0), Le(10_000)] = 10
    """Rate limit refusals in a row after which it is refused for a while, uncounted. 0: never."""
    cooldown_seconds: Seconds = 10.0
    """Length of the first such pause; each further one is twice as long ..."""
    max_cooldown_seconds: Seconds = 300.0
    """... up to this."""

    def __post_init__(self) -> None:
        if self.max_cooldown_seconds < self.cooldown_seconds:
            raise ValueError("max_cooldown_seconds must not be less than cooldown_seconds")

    @property
    def cooldown(self) -> CooldownRule:
        """When the client has to pause, and for how long."""
        return CooldownRule(
            after_refusals=self.cooldown_after_refusals,
            seconds=self.cooldown_seconds,
            max_seconds=self.max_cooldown_seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantRates:
    """How much tenants may ask for, counted before anything is queued, over HTTP and gRPC."""

    default: Annotated[Rates | None, PUBLIC] = None
    """For tenants that are not named, such as `[50req/min, 20000tok/min]` (or `/sec`, `/hour`, `/day`, `/week`,
    `/month`). Prompt tokens are estimated first and corrected when the answer is complete. Default: `[50req/min]` where
    `multi_tenant` is on, else none."""
    tenants: Annotated[Mapping[TenantName, Rates], MaxLen(10_000), PUBLIC] = field(default_factory=dict)
    """By tenant, as in X-Tenant-ID."""


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
