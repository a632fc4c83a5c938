"""/v1/responses: create, retrieve, cancel and delete responses, and list their input items."""

from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from gateway.answers.compaction import CompactionPlan, Summary, SummarySeal, seal_of
from gateway.answers.generation import Work, streamed, unary
from gateway.answers.server_tools import failed, require_no_failing_tool
from gateway.answers.sse_writer import EventStream
from gateway.answers.summary_passes import NOT_REPEATABLE, SummaryPasses, is_repeated
from gateway.answers.unary import json_response
from gateway.deps import GatewayDeps
from gateway.gateway_config import KeepResponses
from gateway.http.framing import no_websocket
from gateway.intake.body import read_json_body
from gateway.intake.headers import idempotency_key_of
from gateway.intake.json_guard import parse, without_halves
from gateway.intake.query import Query, begin_owned
from gateway.openai.chat_builder import ChatTranslation
from gateway.openai.extension_fields import unsupported
from gateway.openai.sampling import wants_events
from gateway.request_facts import facts_of, headers_of
from gateway.responses.background import (
    BackgroundResponses,
    StreamPosition,
    answered,
    followed,
    origin_of,
    require_possible,
)
from gateway.responses.compaction_items import COMPACTION, SummaryItems, compaction_plan
from gateway.responses.conversations import FIELD, InTurn, Turn, page_of, require_room, turn_in
from gateway.responses.document import ResponseDocument
from gateway.responses.history import conversation_of, items_to_store
from gateway.responses.output import new_response_id
from gateway.responses.payload import Conversation, failed_call, own_items, to_response_request
from gateway.responses.replay import FROM_THE_START
from gateway.responses.response_stream import ResponsesAnswer, ResponsesStream
from gateway.responses.retrieval import Responses, Stored, not_streamed_again
from gateway.responses.running import LiveResponse
from gateway.responses.schema import ResponsesRequest
from gateway.responses.tool_search import with_known_tools
from weft.api.common.v1 import receipt_pb2
from weft.api.common.v1.usage_pb2 import Usage
from weft.dispatch.request_receipt import RequestContext
from weft.durable.responses import ResponseClient
from weft.durable.tasks import TaskClient
from weft.kernel.errors.error_tree import found_or_none, invalid_field
from weft.kernel.requests.request_values import Operation

SURFACE = "responses"


def responses_of(deps: GatewayDeps, store: ResponseClient | None, tasks: TaskClient | None) -> Responses:
    """Returns the collaborators of one gateway over the response store and the task port."""
    config, background = deps.config, None
    if store is not None and tasks is not None:
        watches = deps.watches.beside(config.max_running_responses, "gateway.max_running_responses")
        background = BackgroundResponses(tasks, store, deps.clock, watches, deps.summaries)
    return Responses(
        deps=deps,
        store=store,
        running=deps.running,
        keeps=config.keep_responses,
        background=background,
    )


async def create_response(responses: Stored, request: Request) -> Response:
    """Creates a response, as one answer, as server-sent events, or in the background."""
    deps, scope = responses.deps, request.scope
    # The origin of a background response is read again, by a stricter parser.
    raw = without_halves(await read_json_body(scope, request.receive, deps.config))
    params = parse(ResponsesRequest, raw, max_depth=deps.config.limits.max_json_depth)
    context = deps.context(scope, surface=SURFACE, params=params, model=params.model, operation=Operation.CHAT)
    make = partial(_created, responses, scope, raw, params, context)
    if params.conversation is None:
        return await make(None)
    if is_repeated(context) or (params.background and idempotency_key_of(headers_of(scope))):
        raise invalid_field(FIELD, "must not be combined with Idempotency-Key: a repeated request finds it longer")
    return InTurn(turn_in(responses, context.tenant, params.conversation), make)


async def _created(
    responses: Responses, scope: Scope, raw: bytes, params: ResponsesRequest, context: RequestContext, turn: Turn | None
) -> Response:
    """Returns the response to a request. `turn`: in its conversation; None: it has none."""
    deps = responses.deps
    background = _background(params, responses) if params.background else None
    items, most = own_items(params), deps.config.limits.max_json_members
    conversation = await conversation_of(
        responses.background or responses.store,
        context.tenant,
        items,
        params.previous_response_id,
        max_members=most,
        seal=seal_of(deps.summaries, context.tenant),
        record=None if turn is None else turn.record,
    )
    if turn is not None:
        require_room(responses, turn.record, items, "input", len(raw))
    params = with_known_tools(params, [*conversation.earlier, *conversation.items])
    media = deps.request_media(params)
    # A background response runs where no gateway is.
    hosted = None if background is not None else deps.request_tools(scope, params, context)
    made = to_response_request(params, conversation, media, deps.config.limits, hosted)
    if conversation.seal_of_answer is not None:
        context = replace(context, compaction=receipt_pb2.Compaction())
    plan = compaction_plan(params)
    if plan is not None and (background or is_repeated(context)):
        plan = None
        made.warnings.append(unsupported("context_management", NOT_REPEATABLE))
    work = Work(deps, scope, context, made.payload, made.warnings, media)
    if background is None:
        return await _live(responses, work, params, conversation, made, plan, turn)
    require_no_failing_tool(made.failing)
    origin = origin_of(raw, items, conversation.items, made.warnings, deps.config.response_envelope)
    submit = partial(background.submit, work, origin, None if turn is None else turn.pass_to)
    return followed(background, deps, submit) if params.stream else answered(background, work, submit)


async def _live(
    responses: Responses,
    work: Work,
    params: ResponsesRequest,
    conversation: Conversation,
    made: ChatTranslation,
    plan: CompactionPlan | None,
    turn: Turn | None,
) -> Response:
    """Returns a response in the foreground."""
    deps, context, keeps = work.deps, work.context, _keeps(params, responses)
    document = ResponseDocument(
        params,
        new_response_id(),
        clock=deps.clock,
        is_stored=keeps is not None,
        arrived=facts_of(work.scope).arrived,
        envelope=deps.config.response_envelope,
    )
    if (seal := conversation.seal_of_answer) is not None:
        document.items = SummaryItems(document.response_id, seal)
        work = replace(work, layers=(SummaryPasses(work, CompactionPlan()).or_in_parts,))
    elif plan is not None and conversation.seal is not None:
        note = partial(_note_summary, document, conversation.seal)
        work = replace(work, layers=(SummaryPasses(work, plan, note, adds_usage=True),))
    answer_of, stream_of = ResponsesAnswer, ResponsesStream
    if made.failing is not None:
        document.items.first = failed_call(made.failing)
        work = replace(work, layers=(failed(deps.fleet.view, made.failing.words, work.warnings),))
    elif made.hosted is not None:
        from gateway.responses.search_output import SearchAnswer, SearchStream, with_searches  # noqa: PLC0415

        work, answer_of, stream_of = with_searches(work, document, params, made.hosted), SearchAnswer, SearchStream
    items = b"" if keeps is None and turn is None else items_to_store(conversation.items, document.response_id)
    before, add_to = params.previous_response_id or "", None if turn is None else turn.add
    make = partial(LiveResponse, context.tenant, store=keeps, items=items, previous_id=before, add_to=add_to)
    if not params.stream:
        answer = answer_of(document)
        # Only streamed responses publish their id before their end.
        return unary(replace(work, layers=(*work.layers, make(answer, running=None))), answer)
    responses.running.require_room()
    encoder = stream_of(document, include_events=wants_events(params))
    live = make(encoder, running=responses.running)
    if params.store and keeps is not None:
        await _require_store(keeps, live)
    return streamed(replace(_cancellable(work, live), layers=(*work.layers, live)), encoder)


def _note_summary(document: ResponseDocument, seal: SummarySeal, summary: Summary | None, _usage: Usage) -> None:
    """Begins the output with a summary."""
    if summary is not None:
        document.items.first = (COMPACTION, {"encrypted_content": seal.seal(summary)})


def _background(params: ResponsesRequest, responses: Responses) -> BackgroundResponses:
    """Raises INVALID_ARGUMENT naming the field if the response cannot run in the background."""
    if responses.keeps is KeepResponses.NEVER:
        raise invalid_field("background", "must be false: this gateway stores no responses")
    if responses.background is None:
        raise invalid_field("background", "must be false: background responses are not available")
    require_possible(params)
    return responses.background


def _keeps(params: ResponsesRequest, responses: Responses) -> ResponseClient | None:
    """Returns the store for the response; None: not stored. Raises INVALID_ARGUMENT for an impossible `store`."""
    if params.store and (responses.store is None or responses.keeps is KeepResponses.NEVER):
        raise invalid_field("store", "must be false: this gateway stores no responses")
    is_wanted = responses.keeps is KeepResponses.BY_DEFAULT if params.store is None else params.store
    return responses.store if is_wanted else None


async def _require_store(store: ResponseClient, live: LiveResponse) -> None:
    """Raises SERVICE_UNAVAILABLE if the store is down, while that can still be an HTTP status."""
    await found_or_none(store.get(live.tenant, live.response_id))


def _cancellable(work: Work, live: LiveResponse) -> Work:
    """Returns work whose durable task, if any, ends when the response is cancelled."""
    context, journal = work.context, work.context.journal
    if journal is None:
        return work
    journal = replace(journal, is_ended=lambda: live.is_ended)
    return replace(work, context=replace(context, journal=journal))


async def refuse_websocket() -> Response:
    """Refuses a WebSocket, upon which Codex sends its requests over HTTP."""
    raise no_websocket()


STREAM_PARAMETERS = ("stream", "starting_after")
_FLAGS = {"true": True, "1": True, "false": False, "0": False}
MAX_SEQUENCE_NUMBER = 2**53
"""Maximum that clients with doubles as their only numbers can represent exactly."""


async def get_response(responses: Stored, request: Request) -> Response:
    """Returns a stored or running response. A background response can also be streamed, from any event on."""
    tenant, response_id = begin_owned(request, SURFACE, "response_id")
    # Clients send unknown parameters, and some twice, as lists.
    query = Query(request.scope, known=None)
    is_resumed = "starting_after" in query
    starting_after = query.count("starting_after", MAX_SEQUENCE_NUMBER, least=0) if is_resumed else FROM_THE_START
    if not _wants_stream(query):
        if is_resumed:
            raise invalid_field("starting_after", "is only allowed with stream=true")
        return _json(await responses.body(tenant, response_id))
    background = responses.background
    if background is None:
        raise not_streamed_again()
    position = StreamPosition(max(0, starting_after))
    events = await responses.events(tenant, response_id, position, starting_after)
    return EventStream(responses.deps, events, watches=background.watches, failure=position.broken_off)


async def delete_response(responses: Stored, request: Request) -> Response:
    """Deletes a response."""
    tenant, response_id = begin_owned(request, SURFACE, "response_id")
    await responses.delete(tenant, response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def cancel_response(responses: Stored, request: Request) -> Response:
    """Cancels a streamed or background response. The content generated so far is stored."""
    tenant, response_id = begin_owned(request, SURFACE, "response_id")
    return _json(await responses.cancel(tenant, response_id))


async def list_input_items(responses: Stored, request: Request) -> Response:
    """Lists the input of a stored response, last item first."""
    tenant, response_id = begin_owned(request, SURFACE, "response_id")
    return page_of(request, await responses.input_items(tenant, response_id), "names no item of this response")


def _wants_stream(query: Query) -> bool:
    stream = _FLAGS.get(query.text("stream").lower()) if "stream" in query else False
    if stream is None:
        raise invalid_field("stream", "must be true or false")
    return stream


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
