"""What the routes share: the collaborators of one gateway, handed in when the application is made."""

from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.types import Scope

from gateway.authentication import Gate, OpenGate
from gateway.config import GatewayConfig
from gateway.event_watches import EventWatches
from gateway.facts import RequestFacts, facts_of
from gateway.identity import request_context
from gateway.media import MediaSource, NoMediaSource, RequestMedia
from gateway.metrics import GatewayMetrics
from gateway.ports import RegistryPort, RequestDispatcher
from gateway.rate_limits import TenantRateLimits
from gateway.request_caps import require_within
from gateway.schemas.base import HandledRequest
from gateway.translate.pieces import AnswerIdentity
from weft.dispatch.fleet import FleetSource
from weft.dispatch.journey import RequestContext
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.ids import new_id
from weft.kernel.request import Operation


def _nobody_listens(model_label: str, tenant: str) -> None:
    """Nothing to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceParts:
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
    on_limited: Callable[[str, str], None] = _nobody_listens
    """Told the model's label and the tenant of a request that was one too many."""

    def context(
        self,
        scope: Scope,
        *,
        surface: str,
        asked: HandledRequest,
        model: str,
        operation: Operation,
    ) -> RequestContext:
        """The request for the dispatcher, noted in its facts and counted for its tenant.

        Raises INVALID_ARGUMENT for a wrong header or name, RATE_LIMIT_EXCEEDED for a tenant that asks too often.
        """
        facts = facts_of(scope)
        facts.surface = surface
        facts.model = self.metrics.model_label(model, self.fleet.view)
        context = request_context(scope, self.config, asked, model=model, operation=operation)
        require_within(asked, self.config.limits)
        if self.rate_limits is not None:
            self._count(self.rate_limits, context.tenant, facts.model)
        return context

    def _count(self, limits: TenantRateLimits, tenant: str, model_label: str) -> None:
        try:
            limits.take(tenant)
        except WeftError:
            self.on_limited(model_label, tenant)
            raise

    def request_media(self, asked: HandledRequest) -> RequestMedia:
        """For the images and recordings of one request."""
        return RequestMedia(self.config.media, allow_remote=asked.allow_remote)

    def identity(self, prefix: str, model: str) -> AnswerIdentity:
        """The id and birth of an answer."""
        created = int(self.clock.utc_now().timestamp())
        return AnswerIdentity(answer_id=new_id(prefix), created=created, model=model)

    def age_seconds(self, facts: RequestFacts) -> float:
        """How long a request has been here."""
        return self.clock.monotonic() - facts.arrived


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayParts(InferenceParts):
    """One gateway's collaborators."""

    registry: RegistryPort
    watches: EventWatches
