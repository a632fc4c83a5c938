"""Requests with tickets at a runner's HTTP API: a proxy carries them here, and a router has placed them.

The ticket admits a request, and nothing else does: no key, no queue, no limit. Its tenant, id and model are those of
the ticket. An answer is the gateway's, except that nothing of it is sent before its first content: until then a failure
is a status that lets the proxy try the next runner.
"""

from dataclasses import dataclass, fields, replace
from typing import cast

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send
from typing_extensions import override

from gateway.app import EdgeMiddleware
from gateway.auth.authentication import Gate, require_once
from gateway.config import GatewayConfig
from gateway.deps import InferenceDeps
from gateway.endpoints import OPENAI
from gateway.errors import EdgeError, http_status
from gateway.http.server_span import ServerSpans
from gateway.intake.headers import require_bounded_head
from gateway.request_facts import ROUTE_KEY, facts_of, headers_of
from gateway.runner_api.metrics import RequestObserver
from gateway.runner_api.ports import LanePorts
from weft.api.runner.v1 import ticket_pb2
from weft.dispatch.aliases import AskedName
from weft.dispatch.call import LayeredDispatcher
from weft.dispatch.ticket_placement import TicketedAttempt, TicketPlacement
from weft.dispatch.tickets import TICKET_HEADER, tickets_in
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.failures import may_succeed_elsewhere
from weft.kernel.lane_names import REASON_HEADER, TRY_NEXT_HEADER
from weft.kernel.principal import MAY_LEAVE, USE_MODELS, Access, Principal
from weft.kernel.reasons import Reason

_TICKET = TICKET_HEADER.encode()
_ONCE = frozenset({_TICKET})
_ATTEMPT_KEY = "weft.ticketed_attempt"
_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/rerank",
        "/rerank",
        "/v1/tokenize",
        "/tokenize",
    }
)
_TRY_NEXT = 503
"""The status with which a proxy tries the next runner."""
_BROKEN = 502
_ACCESS = frozenset({USE_MODELS, MAY_LEAVE})
"""What the router has checked: the ticket itself says whether the request may leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneDeps(InferenceDeps):
    """Collaborators of the inference endpoints for one request with a ticket."""

    claims: ticket_pb2.TicketClaims

    @override
    def asked(self, scope: Scope, model: str) -> AskedName:
        """Returns the model of the ticket: the router has chosen it for the name in the body."""
        return AskedName(self.claims.model, self.claims.lane.asked_model)


class TicketSwitch:
    """Passes requests with tickets to one application, and all others to another one."""

    def __init__(self, app: ASGIApp, lane: ASGIApp) -> None:
        self._app = app
        self._lane = lane

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        has_ticket = scope["type"] == "http" and _TICKET in headers_of(scope)
        await (self._lane if has_ticket else self._app)(scope, receive, send)


class LaneGate(Gate):
    """Admits requests by their tickets."""

    needs_keys = False

    def __init__(self, ports: LanePorts, clock: Clock) -> None:
        self._ports = ports
        self._clock = clock

    @override
    def admit(self, scope: Scope) -> Principal:
        """Returns the caller that the ticket names. Raises TICKET_INVALID or TICKET_EXPIRED."""
        require_once(scope, _ONCE)
        text = headers_of(scope)[_TICKET].decode("latin-1")
        ticket, claims = self._ports.tickets.reserve(tickets_in(text))
        facts_of(scope).request_id = claims.request_id
        attempt = scope[_ATTEMPT_KEY] = TicketedAttempt(ticket, claims, self._clock, self._ports.reporter.send)
        self._ports.tickets.watch_cancellation(claims, attempt.cancel)
        return Principal(name=claims.lane.caller or "local", tenant=claims.tenant, access=_ACCESS)

    @override
    def allows(self, scope: Scope, access: Access) -> bool:
        return False

    @override
    def identify(self, scope: Scope) -> Principal | None:
        return None


class LaneMiddleware(EdgeMiddleware):
    """The edge around requests with tickets."""

    @override
    def check_head(self, scope: Scope, config: GatewayConfig) -> None:
        # Host and Origin are those of the proxy's callers.
        require_bounded_head(scope, config)

    @override
    def shown(self, error: WeftError) -> WeftError:
        status = http_status(error)
        headers = [*error.headers] if isinstance(error, EdgeError) else []
        headers.append((REASON_HEADER.encode(), error.reason.name.encode()))
        if "content_started" in error.metadata:
            # The engine has generated for it: it is not repeated elsewhere.
            status = _BROKEN if status == _TRY_NEXT else status
        elif may_succeed_elsewhere(error.reason):
            status = _TRY_NEXT
            headers.append((TRY_NEXT_HEADER.encode(), b"true"))
        found = EdgeError(status, error.reason, error.message, headers=tuple(headers))
        found.metadata.update(error.metadata)
        found.retry_after_seconds = error.retry_after_seconds
        return found


class LaneApp:
    """The application of requests with tickets."""

    def __init__(self, inference: InferenceDeps, ports: LanePorts, observer: RequestObserver) -> None:
        shared = {each.name: getattr(inference, each.name) for each in fields(InferenceDeps)}
        gate = LaneGate(ports, inference.clock)
        own = {"gate": gate, "rate_limits": None, "journal_policy": None, "answers_before_content": False}
        self._deps = LaneDeps(**shared | own, claims=ticket_pb2.TicketClaims())
        self._ports = ports
        self._observer = observer
        self._handlers = {
            (endpoint.method, endpoint.path): endpoint.handler
            for endpoint in OPENAI.endpoints
            if endpoint.path in _PATHS
        }
        self._edge = LaneMiddleware(
            self._route,
            config=inference.config,
            metrics=inference.metrics,
            clock=inference.clock,
            gate=gate,
            fleet=inference.fleet,
            spans=ServerSpans(inference.tracing, inference.clock, inference.service),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, and report its end."""
        try:
            await self._edge(scope, receive, send)
        finally:
            attempt = cast("TicketedAttempt | None", scope.get(_ATTEMPT_KEY))
            if attempt is not None:
                self._ports.tickets.release(attempt.claims)
                error = facts_of(scope).error
                attempt.end_refused(Reason.INTERNAL if error is None else error.reason)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._handlers.get((scope["method"], scope["path"]))
        if handler is None:
            raise WeftError(Reason.NOT_FOUND, "no endpoint for requests with tickets has this path and method")
        scope[ROUTE_KEY] = scope["path"]
        attempt: TicketedAttempt = scope[_ATTEMPT_KEY]
        dispatcher = self._ports.dispatcher(TicketPlacement(attempt, self._ports.runner))
        counting = LayeredDispatcher(dispatcher, self._observer.counted)
        deps = replace(self._deps, dispatcher=counting, claims=attempt.claims)
        response = await handler(deps, Request(scope, receive))
        await response(scope, receive, send)
