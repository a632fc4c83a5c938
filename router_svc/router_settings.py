"""Settings of a router: the section `router` of weft.yaml."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import MaxLen

from router_svc.durable.limits import (
    BatchLimits,
    RecordLimits,
    ResponseLimits,
    ResultLimits,
    TaskLimits,
    UsageLimits,
)
from router_svc.policy.limits import QueueLimits
from router_svc.policy.pool_settings import ClientName, ClientProfile, Settings, TenantRates
from weft.kernel.settings.setting_annotations import PUBLIC, SECRET, Name

WakeRecipeKind = Literal["wake_on_lan", "http", "command"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings(QueueLimits, Settings):
    """The scheduler."""

    name: Name | None = None
    """Name of the router in the mesh; it must stay the same after a restart. Default: derived from the machine's name
    and the address on which it listens."""
    wake_recipes: frozenset[WakeRecipeKind] = frozenset({"wake_on_lan", "http"})
    """Wake recipes that the router runs for models with `by: mesh`. `command` runs a program on the router's host."""
    clients: Annotated[Mapping[ClientName, ClientProfile], MaxLen(1_024), PUBLIC] = field(default_factory=dict)
    """Client profiles, by client id (X-Client-Id)."""
    multi_tenant: Annotated[bool, PUBLIC] = False
    """Whether each tenant is limited to 50req/min unless `rate_limits` is set."""
    database_url: Annotated[str | None, PUBLIC, SECRET] = field(default=None, repr=False)
    """Database of durable tasks, batches, files, stored responses, usage and request records. Default: a SQLite file
    under the home. PostgreSQL: see `registry.database_url`."""
    responses: ResponseLimits = field(default_factory=ResponseLimits)
    """Stored responses."""
    tasks: TaskLimits = field(default_factory=TaskLimits)
    """Durable tasks."""
    results: ResultLimits = field(default_factory=ResultLimits)
    """Images and recordings of tasks."""
    batches: BatchLimits = field(default_factory=BatchLimits)
    """Files and batches."""
    usage: UsageLimits = field(default_factory=UsageLimits)
    """Usage of tenants, keys and models."""
    records: RecordLimits = field(default_factory=RecordLimits)
    """Request records and other state that survives a restart of the router."""
    rate_limits: Annotated[TenantRates | None, PUBLIC] = None
    """Rate limits of tenants. Default: the environment variables TENANT_RATE_LIMIT_<tenant> and DEFAULT_RATE_LIMIT if
    ENABLE_MULTI_TENANT=true, else as `multi_tenant` says."""
