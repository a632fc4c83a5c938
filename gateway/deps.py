"""Collaborators of one gateway's handlers, injected when the application is created."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from starlette.types import Scope

from gateway.auth.authentication import Gate
from gateway.auth.rate_limits import TenantRateLimits
from gateway.gateway_config import GatewayConfig
from gateway.gateway_metrics import GatewayMetrics
from gateway.http.event_watches import EventWatches
from gateway.intake.headers import MAX_WAIT_HEADER, journal_of, request_context, tenant_of
from gateway.intake.request_model import HandledRequest, require_within
from gateway.media import MediaSource, NoMediaSource, RequestMedia
from gateway.registry_client import RegistryClient
from gateway.request_facts import RequestFacts, facts_of
from gateway.result_links import ResultLinks
from gateway.routing import collaborator
from gateway.running_responses import RunningResponses
from gateway.sealed_texts import SealedTexts
from gateway.server_tools.request_tools import RequestTools, ServerTools
from weft.dispatch.aliases import AskedName, asked_name
from weft.dispatch.call import RequestDispatcher
from weft.dispatch.fleet import FleetSource
from weft.dispatch.remote_router import RouterSource
from weft.dispatch.request_receipt import RequestContext
from weft.dispatch.token_counts import PromptCounts
from weft.durable.batches import FileClient
from weft.durable.journal_policy import JournalPolicy
from weft.kernel.errors.error_tree import FieldError, WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import TASK_OPERATIONS, TEXT_OPERATIONS, Operation
from weft.kernel.services.health import HealthSource
from weft.kernel.telemetry.tracing import NO_TRACING, ServiceName, Tracing
from weft.kernel.time.clock import Clock


def _ignore_limited(model_label: str, tenant: str) -> None:
    """Does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceDeps:
    """Collaborators of the inference endpoints."""

    config: GatewayConfig
    dispatcher: RequestDispatcher
    fleet: FleetSource
    metrics: GatewayMetrics
    clock: Clock
    gate: Gate = field(default_factory=Gate)
    """Authenticates callers; the default is for loopback without keys."""
    media: MediaSource = field(default_factory=NoMediaSource)
    """Fetches media by URL."""
    rate_limits: TenantRateLimits | None = None
    """None: no limit."""
    files: FileClient | None = None
    """Stores images and recordings of tasks; None: there are no such tasks."""
    links: ResultLinks | None = None
    """Signs URLs of images and recordings; None: answers contain them."""
    summaries: SealedTexts | None = None
    """Seals the summaries of compacted conversations; None: none are compacted."""
    prompt_counts: PromptCounts = field(default_factory=PromptCounts)
    """The lengths of prompts as engines count them."""
    can_be_durable: bool = False
    """Whether the dispatcher can run requests as durable tasks."""
    journal_policy: JournalPolicy | None = None
    """Which requests a setting makes durable tasks; None: none."""
    tracing: Tracing = NO_TRACING
    """Receives the spans of requests."""
    service: ServiceName = ServiceName.GATEWAY
    """The service in these spans."""
    health: HealthSource = HealthSource()  # noqa: RUF009 - it has no state
    """The health of this process."""
    server_tools: ServerTools | None = None
    """Tools that the gateway runs for models; None: there are none."""
    on_limited: Callable[[str, str], None] = _ignore_limited
    """Called with the model's label and the tenant of each request that exceeds a rate limit."""

    def context(
        self,
        scope: Scope,
        *,
        surface: str,
        params: HandledRequest,
        model: str,
        operation: Operation,
        asked: AskedName | None = None,
    ) -> RequestContext:
        """Returns the dispatcher's context of a request; records it in the request's facts and counts the request.

        `asked`: the resolved `model`, if it is known already. Raises INVALID_ARGUMENT for a wrong header or name,
        UNSUPPORTED_OPERATION for a request that must be journaled but cannot be, RATE_LIMIT_EXCEEDED above the tenant's
        rate limit.
        """
        tenant = tenant_of(scope)
        asked = asked or asked_name(self.fleet.view, model, tenant)
        model = asked.model
        self.note(scope, surface=surface, model=model)
        context = request_context(scope, self.config, params, tenant=tenant, asked=asked, operation=operation)
        require_within(params, self.config.limits)
        required = None
        if self.journal_policy is not None:
            required = self.journal_policy.required(model, tenant, operation)
        can_be_durable = self.can_be_durable and (operation in TEXT_OPERATIONS or self.files is not None)
        if required is not None and operation in TASK_OPERATIONS - TEXT_OPERATIONS and self.files is None:
            words = f"requests for {model} are journaled, but this gateway does not store images and recordings"
            raise FieldError("model", words, Reason.UNSUPPORTED_OPERATION)
        journal = journal_of(scope, params, operation, is_possible=can_be_durable, required=required)
        if journal is not None and context.max_wait_seconds is not None:
            raise invalid_field(MAX_WAIT_HEADER, "is not for requests that run as tasks")
        self.count(scope, tenant)
        return context if journal is None else replace(context, journal=journal)

    def asked(self, scope: Scope, model: str) -> AskedName:
        """Resolves a request's model: an id to its name, an alias of the tenant to its target."""
        return asked_name(self.fleet.view, model, tenant_of(scope))

    def note(self, scope: Scope, *, surface: str, model: str) -> None:
        """Records the API and model of a request in its facts."""
        facts = facts_of(scope)
        facts.surface = surface
        facts.model = self.fleet.view.label(model)

    def count(self, scope: Scope, tenant: str) -> None:
        """Counts a request for its tenant. Raises RATE_LIMIT_EXCEEDED above its rate limit."""
        if self.rate_limits is None:
            return
        try:
            self.rate_limits.take(tenant)
        except WeftError:
            self.on_limited(facts_of(scope).model, tenant)
            raise

    def request_media(self, params: HandledRequest) -> RequestMedia:
        """Returns a collector for the images and recordings of one request."""
        return RequestMedia(self.config.media, allow_remote=params.allow_remote)

    def request_tools(self, scope: Scope, params: HandledRequest, context: RequestContext) -> RequestTools | None:
        """Returns the tools that the gateway may run for a request; None: none, as for a durable task."""
        if self.server_tools is None or context.journal is not None:
            return None
        principal = facts_of(scope).principal
        return RequestTools(self.server_tools, context.tenant, principal, allow_remote=params.allow_remote)

    def age_seconds(self, facts: RequestFacts) -> float:
        """Returns the seconds since the request arrived."""
        return self.clock.monotonic() - facts.arrived


Inference = Annotated[InferenceDeps, collaborator(InferenceDeps)]
"""The collaborators of a handler, which FastAPI passes to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayDeps(InferenceDeps):
    """Collaborators of all endpoints of one gateway."""

    registry: RegistryClient
    watches: EventWatches
    running: RunningResponses[Any]
    """The responses being streamed."""
    router: RouterSource | None = None
    """Whether a router is reachable; None: it runs in this process."""


Gateway = Annotated[GatewayDeps, collaborator(GatewayDeps)]
