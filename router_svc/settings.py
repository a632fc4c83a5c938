"""What an operator sets for a router: the section `router` of weft.yaml."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import MaxLen

from router_svc.durable.limits import (
    BatchSettings,
    RecordSettings,
    ResponseSettings,
    ResultSettings,
    TaskSettings,
    UsageSettings,
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
    responses: ResponseSettings = field(default_factory=ResponseSettings)
    """Kept responses."""
    tasks: TaskSettings = field(default_factory=TaskSettings)
    """Durable tasks."""
    results: ResultSettings = field(default_factory=ResultSettings)
    """Images and recordings of tasks."""
    batches: BatchSettings = field(default_factory=BatchSettings)
    """Files and batches."""
    usage: UsageSettings = field(default_factory=UsageSettings)
    """Usage of tenants, keys and models."""
    records: RecordSettings = field(default_factory=RecordSettings)
    """Records of requests, and what else a router knows after a restart."""
    rate_limits: Annotated[TenantRates | None, PUBLIC] = None
    """How much tenants may ask for. Default: the environment's TENANT_RATE_LIMIT_<tenant> and DEFAULT_RATE_LIMIT where
    ENABLE_MULTI_TENANT=true, else as `multi_tenant` sets."""
