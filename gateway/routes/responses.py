"""POST /v1/responses."""

from collections.abc import Callable
from dataclasses import dataclass

from fastapi import FastAPI, Request, Response

from gateway.body import read_json_body
from gateway.config import GatewayConfig
from gateway.facts import facts_of
from gateway.generation import Work, streamed, whole
from gateway.json_guard import parse
from gateway.openapi import json_body
from gateway.parts import InferenceParts
from gateway.ports import Generation
from gateway.responses.bounded_store import BoundedStore
from gateway.responses.config import KeepResponses
from gateway.responses.generation import RespondingGeneration
from gateway.responses.history import conversation_of, items_to_keep
from gateway.responses.keeping import GrowingResponse, Keeping
from gateway.responses.running import RunningResponse, RunningResponses
from gateway.schemas.responses import ResponsesRequest
from gateway.translate.responses import Conversation, own_items, to_asked, wants_logprobs
from gateway.translate.responses_answer import ResponsesAnswer
from gateway.translate.responses_document import ResponseDocument, ResponseState
from gateway.translate.responses_ids import new_response_id
from gateway.translate.responses_stream import ResponsesStream
from gateway.translate.sampling import wants_events
from weft.dispatch.journey import RequestContext
from weft.dispatch.stored_responses import ResponseStore
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation

SURFACE = "responses"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesParts:
    """What the routes of responses need besides."""

    store: ResponseStore | None
    """None: no responses are kept."""
    running: RunningResponses
    keeps: KeepResponses = KeepResponses.BY_DEFAULT


@dataclass(frozen=True, slots=True)
class RespondingWork(Work):
    """A translated request whose response may be looked at, ended and kept."""

    responding: Callable[[Generation], RespondingGeneration] | None = None

    def begin(self) -> Generation:
        """See Work.begin."""
        generation = Work.begin(self)
        return generation if self.responding is None else self.responding(generation)


def responses_parts(config: GatewayConfig, store: ResponseStore | None) -> ResponsesParts:
    """Those of one gateway over whoever keeps responses."""
    timeout = config.response_store_timeout_seconds
    bounded = None if store is None else BoundedStore(store, timeout_seconds=timeout)
    running = RunningResponses(config.max_running_responses)
    return ResponsesParts(store=bounded, running=running, keeps=config.keep_responses)


def add_responses(app: FastAPI, parts: InferenceParts, responses: ResponsesParts) -> None:
    """Add the route."""

    async def create_response(request: Request) -> Response:
        """Answer, as one response or as a stream of server-sent events."""
        scope = request.scope
        raw = await read_json_body(scope, request.receive, parts.config)
        asked = parse(ResponsesRequest, raw, max_depth=parts.config.limits.max_json_depth)
        context = parts.context(scope, surface=SURFACE, asked=asked, model=asked.model, operation=Operation.CHAT)
        keeps, items = _keeps(asked, responses), own_items(asked)
        previous, most = asked.previous_response_id, parts.config.limits.max_json_members
        conversation = await conversation_of(responses.store, context.tenant, items, previous, max_members=most)
        media = parts.request_media(asked)
        made = to_asked(asked, conversation, media, parts.config.limits)
        state = ResponseState(model=asked.model, is_stored=keeps is not None)
        arrived = facts_of(scope).arrived
        document = ResponseDocument(asked, new_response_id(), clock=parts.clock, arrived=arrived)
        keeping = None if keeps is None else _keeping(keeps, asked, context, conversation, document)
        logprobs = wants_logprobs(asked)
        if not asked.stream:
            answer = ResponsesAnswer(document, state, logprobs=logprobs)
            responding = _responding(responses, context, document, answer, keeping, is_streamed=False)
            work = RespondingWork(parts, scope, context, made.payload, made.warnings, media, responding)
            return whole(work, answer)
        responses.running.require_room()
        if asked.store and keeping is not None:
            await _require_store(keeping)
        encoder = ResponsesStream(document, state, logprobs=logprobs, include_events=wants_events(asked))
        responding = _responding(responses, context, document, encoder, keeping, is_streamed=True)
        work = RespondingWork(parts, scope, context, made.payload, made.warnings, media, responding)
        return streamed(work, encoder)

    app.add_api_route(
        "/v1/responses",
        create_response,
        methods=["POST"],
        tags=["openai"],
        openapi_extra=json_body(ResponsesRequest),
    )


def _keeps(asked: ResponsesRequest, responses: ResponsesParts) -> ResponseStore | None:
    """Where the response is to be kept; None: nowhere. Raises INVALID_ARGUMENT where it has to be and cannot."""
    if asked.store and (responses.store is None or responses.keeps is KeepResponses.NEVER):
        raise invalid_field("store", "must be false: this gateway keeps no responses")
    is_wanted = responses.keeps is KeepResponses.BY_DEFAULT if asked.store is None else asked.store
    return responses.store if is_wanted else None


def _keeping(
    store: ResponseStore,
    asked: ResponsesRequest,
    context: RequestContext,
    conversation: Conversation,
    document: ResponseDocument,
) -> Keeping:
    return Keeping(
        store=store,
        id=document.response_id,
        tenant=context.tenant,
        previous_id=asked.previous_response_id or "",
        created_at=document.created_at,
        items=items_to_keep(conversation.items, document.response_id),
    )


async def _require_store(keeping: Keeping) -> None:
    """Raises SERVICE_UNAVAILABLE while it can still be a status: a stream that began cannot be refused."""
    try:
        await keeping.store.get(keeping.tenant, keeping.id)
    except WeftError as error:
        if error.reason is not Reason.NOT_FOUND:
            raise


def _responding(
    responses: ResponsesParts,
    context: RequestContext,
    document: ResponseDocument,
    growing: GrowingResponse,
    keeping: Keeping | None,
    *,
    is_streamed: bool,
) -> Callable[[Generation], RespondingGeneration]:
    """Only a streamed response has an id that somebody could know before its end."""
    running = RunningResponse(context.tenant, document.response_id, growing, keeping) if is_streamed else None

    def around(generation: Generation) -> RespondingGeneration:
        return RespondingGeneration(generation, growing, keeping=keeping, running=running, everyone=responses.running)

    return around
