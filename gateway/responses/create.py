"""POST /v1/responses."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.generation import Work, streamed, unary
from gateway.config import KeepResponses
from gateway.deps import GatewayDeps
from gateway.intake.body import read_json_body
from gateway.intake.json_guard import parse
from gateway.openai.sampling import wants_events
from gateway.ports import Generation
from gateway.request_facts import facts_of
from gateway.responses.background import (
    BackgroundDeps,
    BackgroundResponses,
    ContinuedResponses,
    Submission,
    origin_of,
    require_background,
)
from gateway.responses.document import ResponseDocument, ResponseState
from gateway.responses.history import conversation_of, items_to_keep
from gateway.responses.kept import BoundedStore, KeptResponses
from gateway.responses.output import new_response_id
from gateway.responses.payload import Conversation, own_items, to_response_request, wants_logprobs
from gateway.responses.running import (
    PartialResponse,
    RecordedGeneration,
    ResponseRecord,
    RunningResponse,
    RunningResponses,
)
from gateway.responses.schema import ResponsesRequest
from gateway.responses.stream import ResponsesAnswer, ResponsesStream
from weft.dispatch.request_trace import RequestContext
from weft.durable.responses import ResponseStore
from weft.durable.tasks import TaskPort
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation

SURFACE = "responses"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesDeps:
    """Collaborators of the endpoints of responses."""

    deps: GatewayDeps
    store: ResponseStore | None
    """None: no responses are stored."""
    kept: KeptResponses
    running: RunningResponses
    keeps: KeepResponses = KeepResponses.BY_DEFAULT
    background: BackgroundDeps | None = None
    """None: there are no background responses."""

    @property
    def continued(self) -> ResponseStore | None:
        """The store for responses that are continued."""
        if self.store is None or self.background is None:
            return self.store
        return ContinuedResponses(self.store, self.background.responses)


@dataclass(frozen=True, slots=True)
class RecordedWork(Work):
    """A translated request whose response can be retrieved, cancelled and stored."""

    responding: Callable[[Generation], RecordedGeneration] | None = None

    def begin(self) -> Generation:
        """See Work.begin."""
        generation = Work.begin(self)
        return generation if self.responding is None else self.responding(generation)


def responses_deps(deps: GatewayDeps, store: ResponseStore | None, tasks: TaskPort | None) -> ResponsesDeps:
    """Returns the collaborators of one gateway over the response store and the task port."""
    config = deps.config
    timeout, most = config.response_store_timeout_seconds, config.max_running_responses
    bounded = None if store is None else BoundedStore(store, timeout_seconds=timeout)
    background = None
    if bounded is not None and tasks is not None:
        found = BackgroundResponses(tasks, bounded, deps.clock, timeout_seconds=timeout)
        background = BackgroundDeps(responses=found, watches=deps.watches.beside(most))
    running = RunningResponses(most)
    return ResponsesDeps(
        deps=deps,
        store=bounded,
        kept=KeptResponses(bounded, running, None if background is None else background.responses),
        running=running,
        keeps=config.keep_responses,
        background=background,
    )


async def create_response(responses: ResponsesDeps, request: Request) -> Response:
    """Answer, as one response or as a stream of server-sent events; or begin one in the background."""
    deps, scope = responses.deps, request.scope
    raw = await read_json_body(scope, request.receive, deps.config)
    params = parse(ResponsesRequest, raw, max_depth=deps.config.limits.max_json_depth)
    context = deps.context(scope, surface=SURFACE, params=params, model=params.model, operation=Operation.CHAT)
    background = _background(params, context, responses) if params.background else None
    keeps = None if background is not None else _keeps(params, responses)
    items, most = own_items(params), deps.config.limits.max_json_members
    conversation = await conversation_of(
        responses.continued, context.tenant, items, params.previous_response_id, max_members=most
    )
    media = deps.request_media(params)
    made = to_response_request(params, conversation, media, deps.config.limits)
    if background is None:
        work = Work(deps, scope, context, made.payload, made.warnings, media)
        return await _live(responses, work, params, keeps, conversation)
    submission = Submission(
        deps=deps,
        background=background,
        scope=scope,
        context=context,
        payload=made.payload,
        media=media,
        origin=origin_of(raw, items, conversation.items, made.warnings),
    )
    return submission.streamed() if params.stream else submission.unary()


async def _live(
    responses: ResponsesDeps,
    work: Work,
    params: ResponsesRequest,
    keeps: ResponseStore | None,
    conversation: Conversation,
) -> Response:
    """Returns the response of a request in the foreground."""
    deps, context = work.deps, work.context
    state = ResponseState(model=params.model, is_stored=keeps is not None)
    document = ResponseDocument(params, new_response_id(), clock=deps.clock, arrived=facts_of(work.scope).arrived)
    keeping = None if keeps is None else _keeping(keeps, params, context, conversation, document)
    logprobs = wants_logprobs(params)
    if not params.stream:
        answer = ResponsesAnswer(document, state, logprobs=logprobs)
        # Only a streamed response publishes its id before its end.
        responding = _responding(responses, answer, keeping, None)
        return unary(_responding_work(work, responding), answer)
    responses.running.require_room()
    if params.store and keeping is not None:
        await _require_store(keeping)
    encoder = ResponsesStream(document, state, logprobs=logprobs, include_events=wants_events(params))
    running = RunningResponse(context.tenant, document.response_id, encoder, keeping)
    responding = _responding(responses, encoder, keeping, running)
    return streamed(_responding_work(_cancellable(work, running), responding), encoder)


def _responding_work(work: Work, responding: Callable[[Generation], RecordedGeneration]) -> RecordedWork:
    return RecordedWork(work.deps, work.scope, work.context, work.payload, work.warnings, work.media, responding)


def _background(params: ResponsesRequest, context: RequestContext, responses: ResponsesDeps) -> BackgroundDeps:
    """Raises INVALID_ARGUMENT naming the field where the response cannot run in the background."""
    if responses.keeps is KeepResponses.NEVER:
        raise invalid_field("background", "must be false: this gateway keeps no responses")
    return require_background(params, context, responses.background)


def _keeps(params: ResponsesRequest, responses: ResponsesDeps) -> ResponseStore | None:
    """The store for the response; None: it is not stored. Raises INVALID_ARGUMENT where `store` is impossible."""
    if params.store and (responses.store is None or responses.keeps is KeepResponses.NEVER):
        raise invalid_field("store", "must be false: this gateway keeps no responses")
    is_wanted = responses.keeps is KeepResponses.BY_DEFAULT if params.store is None else params.store
    return responses.store if is_wanted else None


def _keeping(
    store: ResponseStore,
    params: ResponsesRequest,
    context: RequestContext,
    conversation: Conversation,
    document: ResponseDocument,
) -> ResponseRecord:
    return ResponseRecord(
        store=store,
        id=document.response_id,
        tenant=context.tenant,
        previous_id=params.previous_response_id or "",
        created_at=document.created_at,
        items=items_to_keep(conversation.items, document.response_id),
    )


async def _require_store(keeping: ResponseRecord) -> None:
    """Raises SERVICE_UNAVAILABLE where the store is down, before the stream begins: later it could not be a status."""
    try:
        await keeping.store.get(keeping.tenant, keeping.id)
    except WeftError as error:
        if error.reason is not Reason.NOT_FOUND:
            raise


def _cancellable(work: Work, running: RunningResponse) -> Work:
    """Returns work whose durable task, if any, ends when the response is cancelled."""
    context, journal = work.context, work.context.journal
    if journal is None:
        return work
    journal = replace(journal, is_ended=lambda: running.is_ended)
    return replace(work, context=replace(context, journal=journal))


def _responding(
    responses: ResponsesDeps, growing: PartialResponse, keeping: ResponseRecord | None, running: RunningResponse | None
) -> Callable[[Generation], RecordedGeneration]:
    def around(generation: Generation) -> RecordedGeneration:
        return RecordedGeneration(generation, growing, keeping=keeping, running=running, everyone=responses.running)

    return around
