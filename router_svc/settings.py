"""What an operator sets for a router: the section `router` of weft.yaml."""

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
from router_svc.policy.settings import ClientName, ClientProfile, Settings, TenantRates
from weft.kernel.settings import PUBLIC, SECRET, Name

WakeRecipeKind = Literal["wake_on_lan", "http", "command"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings(QueueLimits, Settings):
    """The scheduler."""

    name: Name | None = None
    """Its name among the routers of the mesh, the same after a restart. Default: made of this machine's name and the
    address at which it listens."""
    wake_recipes: frozenset[WakeRecipeKind] = frozenset({"wake_on_lan", "http"})
    """Kinds of recipes that the router runs for models with `by: mesh`. A command is a program on the router's host."""
    clients: Annotated[Mapping[ClientName, ClientProfile], MaxLen(1_024), PUBLIC] = field(default_factory=dict)
    """Profiles, by client."""
    multi_tenant: Annotated[bool, PUBLIC] = False
    """Whether tenants are limited to 50req/min where `rate_limits` sets nothing else."""
    database_url: Annotated[str | None, PUBLIC, SECRET] = field(default=None, repr=False)
    """The database of durable tasks, batches, files, kept responses, usage and records. Default: an SQLite file under
    the home. PostgreSQL: see `registry.database_url`."""
    responses: ResponseLimits = field(default_factory=ResponseLimits)
    """Kept responses."""
    tasks: TaskLimits = field(default_factory=TaskLimits)
    """Durable tasks."""
    results: ResultLimits = field(default_factory=ResultLimits)
    """Images and recordings of tasks."""
    batches: BatchLimits = field(default_factory=BatchLimits)
    """Files and batches."""
    usage: UsageLimits = field(default_factory=UsageLimits)
    """Usage of tenants, keys and models."""
    records: RecordLimits = field(default_factory=RecordLimits)
    """Records of requests, and what else a router knows after a restart."""
    rate_limits: Annotated[TenantRates | None, PUBLIC] = None
    """How much tenants may ask for. Default: the environment's TENANT_RATE_LIMIT_<tenant> and DEFAULT_RATE_LIMIT where
    ENABLE_MULTI_TENANT=true, else as `multi_tenant` sets."""
