"""What the routes share: the collaborators of one gateway, handed in when the application is made."""

from dataclasses import dataclass

from starlette.types import Scope

from gateway.config import GatewayConfig
from gateway.event_watches import EventWatches
from gateway.facts import RequestFacts, facts_of
from gateway.identity import request_context
from gateway.metrics import GatewayMetrics
from gateway.ports import RegistryPort, RequestDispatcher
from gateway.translate.pieces import AnswerIdentity
from weft.dispatch.fleet import FleetSource
from weft.dispatch.journey import RequestContext
from weft.kernel.clock import Clock
from weft.kernel.ids import new_id
from weft.kernel.request import Operation


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayParts:
    """One gateway's collaborators."""

    config: GatewayConfig
    dispatcher: RequestDispatcher
    fleet: FleetSource
    registry: RegistryPort
    watches: EventWatches
    metrics: GatewayMetrics
    clock: Clock

    def context(
        self, scope: Scope, *, surface: str, model: str, operation: Operation, allow_remote: bool | None
    ) -> RequestContext:
        """The request for the dispatcher, noted in its facts. Raises INVALID_ARGUMENT for a wrong header or name."""
        facts = facts_of(scope)
        facts.surface = surface
        facts.model = self.metrics.model_label(model, self.fleet.view)
        return request_context(scope, self.config, model=model, operation=operation, allow_remote=allow_remote)

    def identity(self, prefix: str, model: str) -> AnswerIdentity:
        """The id and birth of an answer."""
        created = int(self.clock.utc_now().timestamp())
        return AnswerIdentity(answer_id=new_id(prefix), created=created, model=model)

    def age_seconds(self, facts: RequestFacts) -> float:
        """How long a request has been here."""
        return self.clock.monotonic() - facts.arrived
