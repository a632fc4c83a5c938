"""Operator settings of pools and tenants."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class ChoicePolicy(Enum):
    """Selection policy: how one of several free candidates of a pool is chosen."""

    LEAST_LOADED = "least_loaded"
    RANDOM = "random"
    ROUND_ROBIN = "round_robin"
    PREFIX_AFFINITY = "prefix_affinity"
    """The candidate that probably has the prefix of the prompt in its cache, unless it has more than its share of the
    load."""


class RemotePermission(Enum):
    """Whether a tenant's requests may leave the premises."""

    NEVER = "never"
    ON_REQUEST = "on_request"
    """Where the request itself permits it."""
    ALWAYS = "always"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """Settings of one pool."""

    policy: ChoicePolicy = ChoicePolicy.LEAST_LOADED
    max_in_flight: int = 0
    """Maximum number of requests that run on its members; 0: their slots are the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSettings:
    """Settings of one tenant."""

    weight: float = 1.0
    """Its weight when capacity is shared with other tenants. Above 0."""
    max_in_flight: int = 0
    """Maximum number of its requests that run; 0: unlimited."""
    allow_remote: RemotePermission = RemotePermission.ON_REQUEST

    def permits_remote(self, *, asked: bool) -> bool:
        """Whether its request may leave the premises; `asked`: the request itself permits it."""
        match self.allow_remote:
            case RemotePermission.NEVER:
                return False
            case RemotePermission.ON_REQUEST:
                return asked
            case RemotePermission.ALWAYS:
                return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of all pools and tenants, with defaults for those that are not named."""

    pools: Mapping[str, PoolSettings] = field(default_factory=dict)
    tenants: Mapping[str, TenantSettings] = field(default_factory=dict)
    default_pool: PoolSettings = PoolSettings()
    default_tenant: TenantSettings = TenantSettings()

    def pool(self, name: str) -> PoolSettings:
        """Return the settings of a pool."""
        return self.pools.get(name, self.default_pool)

    def tenant(self, name: str) -> TenantSettings:
        """Return the settings of a tenant."""
        return self.tenants.get(name, self.default_tenant)
