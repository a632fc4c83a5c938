"""POST /v1/responses."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.generation import Work, streamed, whole
from gateway.config import KeepResponses
from gateway.deps import GatewayParts
from gateway.intake.body import read_json_body
from gateway.intake.json_guard import parse
from gateway.openai.sampling import wants_events
from gateway.ports import Generation
from gateway.request_facts import facts_of
from gateway.responses.background import BackgroundResponses, ContinuedResponses, origin_of
from gateway.responses.document import ResponseDocument, ResponseState
from gateway.responses.history import conversation_of, items_to_keep
from gateway.responses.kept import BoundedStore, KeptResponses
from gateway.responses.output import new_response_id
from gateway.responses.payload import Conversation, own_items, to_asked, wants_logprobs
from gateway.responses.running import GrowingResponse, Keeping, RespondingGeneration, RunningResponse, RunningResponses
from gateway.responses.schema import ResponsesRequest
from gateway.responses.stream import ResponsesAnswer, ResponsesStream
from gateway.responses.submission import BackgroundParts, Submission, require_background
from weft.dispatch.request_trace import RequestContext
from weft.durable.responses import ResponseStore
from weft.durable.tasks import TaskPort
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation

SURFACE = "responses"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesParts:
    """What the routes of responses need besides."""

    parts: GatewayParts
    store: ResponseStore | None
    """None: no responses are kept."""
    kept: KeptResponses
    running: RunningResponses
    keeps: KeepResponses = KeepResponses.BY_DEFAULT
    background: BackgroundParts | None = None
    """None: there are no responses in the background."""

    @property
    def continued(self) -> ResponseStore | None:
        """Where responses that are continued are found."""
        if self.store is None or self.background is None:
            return self.store
        return ContinuedResponses(self.store, self.background.responses)


@dataclass(frozen=True, slots=True)
class RespondingWork(Work):
    """A translated request whose response may be looked at, ended and kept."""

    responding: Callable[[Generation], RespondingGeneration] | None = None

    def begin(self) -> Generation:
        """See Work.begin."""
        generation = Work.begin(self)
        return generation if self.responding is None else self.responding(generation)


def responses_parts(parts: GatewayParts, store: ResponseStore | None, tasks: TaskPort | None) -> ResponsesParts:
    """Those of one gateway over whoever keeps responses, and whoever runs tasks."""
    config = parts.config
    timeout, most = config.response_store_timeout_seconds, config.max_running_responses
    bounded = None if store is None else BoundedStore(store, timeout_seconds=timeout)
    background = None
    if bounded is not None and tasks is not None:
        found = BackgroundResponses(tasks, bounded, parts.clock, timeout_seconds=timeout)
        background = BackgroundParts(responses=found, watches=parts.watches.beside(most))
    running = RunningResponses(most)
    return ResponsesParts(
        parts=parts,
        store=bounded,
        kept=KeptResponses(bounded, running, None if background is None else background.responses),
        running=running,
        keeps=config.keep_responses,
        background=background,
    )


async def create_response(responses: ResponsesParts, request: Request) -> Response:
    """Answer, as one response or as a stream of server-sent events; or begin one in the background."""
    parts, scope = responses.parts, request.scope
    raw = await read_json_body(scope, request.receive, parts.config)
    asked = parse(ResponsesRequest, raw, max_depth=parts.config.limits.max_json_depth)
    context = parts.context(scope, surface=SURFACE, asked=asked, model=asked.model, operation=Operation.CHAT)
    background = _background(asked, context, responses) if asked.background else None
    keeps = None if background is not None else _keeps(asked, responses)
    items, most = own_items(asked), parts.config.limits.max_json_members
    conversation = await conversation_of(
        responses.continued, context.tenant, items, asked.previous_response_id, max_members=most
    )
    media = parts.request_media(asked)
    made = to_asked(asked, conversation, media, parts.config.limits)
    if background is None:
        work = Work(parts, scope, context, made.payload, made.warnings, media)
        return await _live(responses, work, asked, keeps, conversation)
    submission = Submission(
        parts=parts,
        background=background,
        scope=scope,
        context=context,
        payload=made.payload,
        media=media,
        origin=origin_of(raw, items, conversation.items, made.warnings),
    )
    return submission.streamed() if asked.stream else submission.whole()


async def _live(
    responses: ResponsesParts,
    work: Work,
    asked: ResponsesRequest,
    keeps: ResponseStore | None,
    conversation: Conversation,
) -> Response:
    """The answer to a caller who waits for it."""
    parts, context = work.parts, work.context
    state = ResponseState(model=asked.model, is_stored=keeps is not None)
    document = ResponseDocument(asked, new_response_id(), clock=parts.clock, arrived=facts_of(work.scope).arrived)
    keeping = None if keeps is None else _keeping(keeps, asked, context, conversation, document)
    logprobs = wants_logprobs(asked)
    if not asked.stream:
        answer = ResponsesAnswer(document, state, logprobs=logprobs)
        # Only a streamed response has an id that somebody could know before its end.
        responding = _responding(responses, answer, keeping, None)
        return whole(_responding_work(work, responding), answer)
    responses.running.require_room()
    if asked.store and keeping is not None:
        await _require_store(keeping)
    encoder = ResponsesStream(document, state, logprobs=logprobs, include_events=wants_events(asked))
    running = RunningResponse(context.tenant, document.response_id, encoder, keeping)
    responding = _responding(responses, encoder, keeping, running)
    return streamed(_responding_work(_endable(work, running), responding), encoder)


def _responding_work(work: Work, responding: Callable[[Generation], RespondingGeneration]) -> RespondingWork:
    return RespondingWork(work.parts, work.scope, work.context, work.payload, work.warnings, work.media, responding)


def _background(asked: ResponsesRequest, context: RequestContext, responses: ResponsesParts) -> BackgroundParts:
    """Raises INVALID_ARGUMENT naming the field where the response cannot be in the background."""
    if responses.keeps is KeepResponses.NEVER:
        raise invalid_field("background", "must be false: this gateway keeps no responses")
    return require_background(asked, context, responses.background)


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


def _endable(work: Work, running: RunningResponse) -> Work:
    """Whoever cancels the response ends its task, where it is one: also one that goes on without its caller."""
    context, journal = work.context, work.context.journal
    if journal is None:
        return work
    journal = replace(journal, is_ended=lambda: running.is_ended)
    return replace(work, context=replace(context, journal=journal))


def _responding(
    responses: ResponsesParts, growing: GrowingResponse, keeping: Keeping | None, running: RunningResponse | None
) -> Callable[[Generation], RespondingGeneration]:
    def around(generation: Generation) -> RespondingGeneration:
        return RespondingGeneration(generation, growing, keeping=keeping, running=running, everyone=responses.running)

    return around
