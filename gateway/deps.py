"""What the routes share: the collaborators of one gateway, handed in when the application is made."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from starlette.types import Scope

from gateway.auth.authentication import Gate, OpenGate
from gateway.auth.rate_limits import TenantRateLimits
from gateway.config import GatewayConfig
from gateway.http.event_watches import EventWatches
from gateway.intake.headers import durable_request_of, request_context
from gateway.intake.request_model import HandledRequest, require_within
from gateway.media import MediaSource, NoMediaSource, RequestMedia
from gateway.metrics import GatewayMetrics
from gateway.ports import RegistryPort, RequestDispatcher
from gateway.request_facts import RequestFacts, facts_of
from weft.dispatch.fleet import FleetSource
from weft.dispatch.request_trace import RequestContext
from weft.dispatch.router_watch import RouterSource
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.request import Operation


def _ignore_limited(model_label: str, tenant: str) -> None:
    """Nothing to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceDeps:
    """What the OpenAI routes need."""

    config: GatewayConfig
    dispatcher: RequestDispatcher
    fleet: FleetSource
    metrics: GatewayMetrics
    clock: Clock
    gate: Gate = field(default_factory=OpenGate)
    """Lets requests in; the default is for loopback, where nobody asked for keys."""
    media: MediaSource = field(default_factory=NoMediaSource)
    """Who fetches the addresses of images."""
    rate_limits: TenantRateLimits | None = None
    """None: tenants may ask as often as they like."""
    can_be_durable: bool = False
    """Whether the dispatcher runs requests as durable tasks where they ask for it."""
    on_limited: Callable[[str, str], None] = _ignore_limited
    """Told the model's label and the tenant of a request that was one too many."""

    def context(
        self,
        scope: Scope,
        *,
        surface: str,
        params: HandledRequest,
        model: str,
        operation: Operation,
    ) -> RequestContext:
        """The request for the dispatcher, noted in its facts and counted for its tenant.

        Raises INVALID_ARGUMENT for a wrong header or name, RATE_LIMIT_EXCEEDED for a tenant that asks too often.
        """
        self.note(scope, surface=surface, model=model)
        context = request_context(scope, self.config, params, model=model, operation=operation)
        require_within(params, self.config.limits)
        journal = durable_request_of(scope, params, operation, is_possible=self.can_be_durable)
        self.count(scope, context.tenant)
        return context if journal is None else replace(context, journal=journal)

    def note(self, scope: Scope, *, surface: str, model: str) -> None:
        """Note what a request asks for in its facts."""
        facts = facts_of(scope)
        facts.surface = surface
        facts.model = self.metrics.model_label(model, self.fleet.view)

    def count(self, scope: Scope, tenant: str) -> None:
        """Count a request for its tenant. Raises RATE_LIMIT_EXCEEDED for one that asks too often."""
        if self.rate_limits is None:
            return
        try:
            self.rate_limits.take(tenant)
        except WeftError:
            self.on_limited(facts_of(scope).model, tenant)
            raise

    def request_media(self, params: HandledRequest) -> RequestMedia:
        """For the images and recordings of one request."""
        return RequestMedia(self.config.media, allow_remote=params.allow_remote)

    def age_seconds(self, facts: RequestFacts) -> float:
        """How long a request has been here."""
        return self.clock.monotonic() - facts.arrived


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayDeps(InferenceDeps):
    """One gateway's collaborators."""

    registry: RegistryPort
    watches: EventWatches
    router: RouterSource | None = None
    """Who knows whether there is a router; None: it is in this very process."""
