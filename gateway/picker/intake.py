"""From a request as the proxy sent it to work for the scheduler: the same checks as those of the gateway, in its order.

What the lane cannot do is passed on to a gateway unread and uncounted: the gateway checks it as any other request.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from starlette.types import Scope

from gateway.deps import InferenceDeps
from gateway.errors import dialect_of
from gateway.intake.body import checked_json
from gateway.intake.headers import request_id_of, tenant_of, validate_head
from gateway.intake.json_guard import parse
from gateway.intake.request_model import HandledRequest
from gateway.media import RequestMedia
from gateway.openai import chat, completions, embeddings
from gateway.openai.chat_schema import ChatRequest
from gateway.openai.completions import CompletionRequest
from gateway.openai.embeddings import EmbeddingRequest
from gateway.openai.sampling import GenerationRequest, wants_events, wants_usage
from gateway.picker.engine_reach import needs_its_machine
from gateway.picker.session import Headers, HttpRequest
from gateway.request_facts import FACTS_KEY, ROUTE_KEY, RequestFacts, facts_of, headers_of
from weft.dispatch.agents import agent_name_of, models_behind
from weft.dispatch.aliases import asked_name
from weft.dispatch.fleet import FleetView
from weft.dispatch.lane import endpoint_in
from weft.dispatch.payload_description import Payload
from weft.dispatch.request_trace import RequestContext
from weft.dispatch.workflows import workflow_name_of
from weft.durable.journal_policy import JournalPolicy
from weft.kernel.names import AUTO_MODEL
from weft.kernel.request import Operation
from weft.kernel.value import value_class


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneApi:
    """An API whose requests runners and engines answer themselves."""

    surface: str
    operation: Operation
    schema: type[HandledRequest]
    payload: Callable[[Any, InferenceDeps, RequestMedia], Payload]
    """Translates a request to what the scheduler describes it by. Raises INVALID_ARGUMENT naming the wrong field."""


LANE_APIS: Mapping[str, LaneApi] = MappingProxyType(
    {
        "/v1/chat/completions": LaneApi(
            surface="chat",
            operation=Operation.CHAT,
            schema=ChatRequest,
            payload=lambda params, deps, media: chat.to_payload(params, deps.config.limits, media),
        ),
        "/v1/completions": LaneApi(
            surface="completions",
            operation=Operation.COMPLETION,
            schema=CompletionRequest,
            payload=lambda params, deps, _: completions.to_payload(params, deps.config.limits),
        ),
        "/v1/embeddings": LaneApi(
            surface="embeddings",
            operation=Operation.EMBEDDING,
            schema=EmbeddingRequest,
            payload=lambda params, deps, _: embeddings.to_payload(params, deps.config.limits),
        ),
    }
)
"""By path; all of them are POST."""
_LOGGED_USAGE = frozenset({Operation.CHAT})
"""Operations of which the proxy's log has the usage of each answer that states it."""


@value_class(kw_only=True)
class LaneWork:
    """A request that the lane serves."""

    scope: Scope
    context: RequestContext
    payload: Payload
    request: HttpRequest
    is_streamed: bool
    shows_usage: bool
    """Whether a complete answer states its usage where the request reaches the engine as it came, and the proxy's log
    has it: then an answer without usage was cut off."""


def scope_of(headers: Headers, arrived: float) -> Scope:
    """Returns a request's head in the form of the gateway's own, with its facts."""
    pseudo, raw = {}, []
    for header in headers:
        name, value = header
        if name.startswith(b":"):
            pseudo[name] = value
        else:
            raw.append(header)
    path, _, query = pseudo.get(b":path", b"/").partition(b"?")
    if b":authority" in pseudo:
        raw.append((b"host", pseudo[b":authority"]))
    scope: Scope = {
        "type": "http",
        "http_version": "1.1",
        "method": pseudo.get(b":method", b"GET").decode("latin-1"),
        "scheme": pseudo.get(b":scheme", b"http").decode("latin-1"),
        "path": path.decode("latin-1"),
        "query_string": query,
        "headers": raw,
        "client": None,
    }
    found = headers_of(scope)
    scope[FACTS_KEY] = RequestFacts(request_id_of(found), arrived, dialect=dialect_of(scope["path"], found))
    return scope


class LaneIntake:
    """Checks requests and translates them."""

    def __init__(self, deps: InferenceDeps, journal: JournalPolicy, *, has_gateway: bool, host: str = "") -> None:
        """`deps` are those of a gateway of the same settings; `has_gateway`: what the lane cannot do goes to one.

        `host`: the name of this machine, as runners report theirs.
        """
        self._host = host
        self._deps = deps
        self._journal = journal
        self._has_gateway = has_gateway

    def work_of(self, scope: Scope, request: HttpRequest) -> LaneWork | None:
        """Returns the work of a request; None: it is for a gateway.

        Raises what a gateway answers to the same request: UNAUTHENTICATED, PERMISSION_DENIED, MALFORMED_REQUEST,
        INVALID_ARGUMENT naming the wrong field or header, REQUEST_TOO_LARGE, RATE_LIMIT_EXCEEDED.
        """
        api = LANE_APIS.get(scope["path"]) if scope["method"] == "POST" else None
        # Pages of other origins get answers with the gateway's own headers.
        if self._has_gateway and (api is None or b"origin" in headers_of(scope)):
            return None
        deps, facts = self._deps, facts_of(scope)
        validate_head(scope, deps.config)
        facts.principal = deps.gate.admit(scope)
        if api is None:
            return None
        scope[ROUTE_KEY], facts.surface = scope["path"], api.surface
        raw = checked_json(scope, request.body, deps.config)
        params: Any = parse(api.schema, raw, max_depth=deps.config.limits.max_json_depth)
        tenant = tenant_of(scope)
        asked = asked_name(deps.fleet.view, params.model, tenant)
        if self._is_for_gateway(tenant, asked.model, api, params):
            return None
        context = deps.context(
            scope, surface=api.surface, params=params, model=params.model, operation=api.operation, asked=asked
        )
        media = deps.request_media(params)
        payload = api.payload(params, deps, media)
        if media.addresses:
            return None
        is_streamed = isinstance(params, GenerationRequest) and bool(params.stream)
        return LaneWork(
            scope=scope,
            context=context,
            payload=payload,
            request=request,
            is_streamed=is_streamed,
            shows_usage=api.operation in _LOGGED_USAGE and (not is_streamed or wants_usage(params)),
        )

    def _is_for_gateway(self, tenant: str, model: str, api: LaneApi, params: Any) -> bool:
        """Whether a request needs a gateway: an agent, a task, events of the mesh, or a runner behind a relay."""
        if params.durable is not None or params.on_disconnect is not None:
            return True
        if isinstance(params, GenerationRequest) and wants_events(params):
            return True
        if agent_name_of(model) is not None or workflow_name_of(model) is not None:
            return True
        if self._journal.required(model, tenant, api.operation) is not None:
            return True
        return self._has_gateway and not all_reachable(self._deps.fleet.view, model, self._host)


def all_reachable(view: FleetView, name: str, host: str = "") -> bool:
    """Whether a proxy reaches each model that may answer for a name; `host`: the machine of picker and proxy."""
    models = view.models.values() if name == AUTO_MODEL else models_behind(view, name)
    for model in models:
        runner = view.runners.get(model.runner)
        if not model.reachable or runner is None:
            continue
        if endpoint_in(runner, model.name) is None or needs_its_machine(runner, model.name, host):
            return False
    return True
