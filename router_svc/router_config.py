"""Configuration of a router."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from router_svc.client_registry import ClientsConfig
from router_svc.figures import FigureLimits
from router_svc.policy.change_buffer import WatchLimits
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.pool_settings import RateLimitConfig, Settings
from router_svc.request_log import RequestLogLimits
from weft.durable.journal_policy import JournalRules
from weft.kernel.channels.outbound import Outbound
from weft.kernel.channels.tls_channel import ChannelSecurity
from weft.kernel.schemas.json_schema import SchemaLimits

MAX_LINKS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig:
    """The relay of one router, for runners that dial out."""

    address: str
    """This router's own gRPC target, at which runners behind the relay are reached."""
    max_links: int = MAX_LINKS
    """Maximum number of open links."""
    max_calls_per_link: int = 1024
    """Calls that may run concurrently on one link."""
    open_timeout_seconds: float = 10.0
    """Longest time from the first byte of a link until its runner has opened a session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Configuration of one router."""

    registry_address: str
    """gRPC target of the registry."""
    name: str = ""
    """Its name among the routers of the mesh. Empty: it takes no part in dividing the mesh, and places everything."""
    address: str = ""
    """Where gateways reach it; of one with a name."""
    security: ChannelSecurity = field(default_factory=ChannelSecurity)
    """Credentials presented and trusted in calls that leave this machine."""
    limits: SchedulerLimits = field(default_factory=SchedulerLimits)
    settings: Settings = field(default_factory=Settings)
    clients: ClientsConfig = field(default_factory=ClientsConfig)
    rate_limits: RateLimitConfig = field(default_factory=RateLimitConfig)
    request_log: RequestLogLimits = field(default_factory=RequestLogLimits)
    figures: FigureLimits = field(default_factory=FigureLimits)
    watches: WatchLimits = field(default_factory=WatchLimits)
    default_timeout_seconds: float = 600.0
    """Deadline of a public gRPC call without one."""
    outbound: Outbound = field(default_factory=Outbound)
    """Addresses that the requests of recipes may have."""
    wake_recipes: frozenset[str] = frozenset({"wake_on_lan", "http"})
    """Kinds of `by: mesh` recipes that it runs: wake_on_lan, http or command. A command is a program on this host."""
    wake_environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment of those recipes: variables of an HTTP recipe's header values, the whole environment of a command."""
    schemas: SchemaLimits = field(default_factory=SchemaLimits)
    """Bounds of the JSON schemas of a public gRPC call."""
    journal: JournalRules = field(default_factory=JournalRules)
    """The modes of tenants whose requests are journaled."""
    only_runner: str = ""
    """The only runner that it places requests on; empty: all runners."""
    relay: RelayConfig | None = None
    """None: runners cannot dial in here."""
