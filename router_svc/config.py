"""How a router is set up."""

from dataclasses import dataclass, field

from router_svc.policy.scheduler import SchedulerLimits
from weft.dispatch.tickets import TICKET_LIFETIME_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """One router."""

    registry_address: str
    """gRPC target of the registry."""
    limits: SchedulerLimits = field(default_factory=SchedulerLimits)
    ticket_lifetime_seconds: float = TICKET_LIFETIME_SECONDS
    default_timeout_seconds: float = 600.0
    """Deadline of a public gRPC call that came without one."""
