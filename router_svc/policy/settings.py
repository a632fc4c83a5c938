"""What operators set for pools and tenants."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class ChoicePolicy(Enum):
    """How one of several free candidates of a pool is chosen."""

    LEAST_LOADED = "least_loaded"
    RANDOM = "random"
    ROUND_ROBIN = "round_robin"
    PREFIX_AFFINITY = "prefix_affinity"
    """Who probably has the beginning of the prompt in its cache, unless it has more than its share of the load."""


class RemotePermission(Enum):
    """Whether a tenant's requests may leave the premises."""

    NEVER = "never"
    ON_REQUEST = "on_request"
    """Where the request itself says so."""
    ALWAYS = "always"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """One pool."""

    policy: ChoicePolicy = ChoicePolicy.LEAST_LOADED
    max_in_flight: int = 0
    """Requests that may run on its members at once; 0: as many as they have slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSettings:
    """One tenant."""

    weight: float = 1.0
    """Its share of what is scarce, against the others'. Above 0."""
    max_in_flight: int = 0
    """Its requests that may run at once; 0: no limit."""
    allow_remote: RemotePermission = RemotePermission.ON_REQUEST

    def permits_remote(self, *, asked: bool) -> bool:
        """Whether its request may leave the premises; `asked`: the request itself allows it."""
        match self.allow_remote:
            case RemotePermission.NEVER:
                return False
            case RemotePermission.ON_REQUEST:
                return asked
            case RemotePermission.ALWAYS:
                return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All of them; who is not named has the default."""

    pools: Mapping[str, PoolSettings] = field(default_factory=dict)
    tenants: Mapping[str, TenantSettings] = field(default_factory=dict)
    default_pool: PoolSettings = PoolSettings()
    default_tenant: TenantSettings = TenantSettings()

    def pool(self, name: str) -> PoolSettings:
        """Those of a pool."""
        return self.pools.get(name, self.default_pool)

    def tenant(self, name: str) -> TenantSettings:
        """Those of a tenant."""
        return self.tenants.get(name, self.default_tenant)
