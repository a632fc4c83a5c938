"""Background responses: durable tasks as responses of the Responses API.

The response's id encodes its task (see `gateway.responses.output`), and any gateway renders the rest from the stored
task. The first gateway that observes its end stores the response like others, so that it outlives its task. It can also
be continued before that.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace

import msgspec
from pydantic import TypeAdapter, ValidationError
from starlette.responses import Response

from gateway.answers.compaction import seal_of
from gateway.answers.generation import Work
from gateway.answers.sse_writer import EventStream
from gateway.answers.unary import JsonAnswer, UnaryAnswer, cut_off_seconds
from gateway.deps import GatewayDeps
from gateway.gateway_config import ResponseEnvelope
from gateway.http.event_watches import EventWatches
from gateway.intake.headers import idempotency_key_of
from gateway.media import supply
from gateway.request_facts import facts_of, headers_of
from gateway.responses.history import items_to_store, with_response
from gateway.responses.output import task_of
from gateway.responses.payload import Conversation, own_items
from gateway.responses.replay import FROM_THE_START, BackgroundRequest, Replay, require_resumable
from gateway.responses.response_stream import error_event
from gateway.responses.schema import InputItem, Items, ResponsesRequest
from gateway.responses.tool_search import with_known_tools
from gateway.sealed_texts import SealedTexts
from weft.api.common.v1 import chat_pb2, warning_pb2
from weft.api.router.v1 import task_pb2, task_service_pb2
from weft.api.router.v1.stored_response_service_pb2 import StoredResponse
from weft.durable.durable_call import of_request, task_spec
from weft.durable.responses import BACKGROUND_KIND, ResponseClient, background_response_id, response_not_found
from weft.durable.tasks import TaskClient, copy_of, is_terminal
from weft.kernel.errors.error_tree import WeftError, found_or_none, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock
from weft.kernel.time.timestamps import stamp_of

_REFERENCE = "item_reference"

_items = TypeAdapter(Items)


_NONE = msgspec.Raw(b"")
"""Placeholder for items that equal those of the body."""


class _Origin(msgspec.Struct, omit_defaults=True):
    body: msgspec.Raw
    items: msgspec.Raw = _NONE
    warnings: list[bytes] = []
    envelope: str = ResponseEnvelope.OPENAI.value
    """The gateway's setting at submission."""


def read_origin(raw: bytes, task_id: str) -> BackgroundRequest:
    """Returns the request of an origin. Raises INTERNAL for an invalid one; `task_id` is for the message."""
    try:
        origin = msgspec.json.decode(raw, type=_Origin)
        params = ResponsesRequest.model_validate_json(bytes(origin.body))
        items = _items.validate_json(bytes(origin.items)) if bytes(origin.items) else own_items(params)
        warnings = [warning_pb2.Warning.FromString(each) for each in origin.warnings]
        envelope = ResponseEnvelope(origin.envelope)
    except (msgspec.MsgspecError, ValidationError, ValueError, WeftError) as error:
        message = f"the request of task {task_id} cannot be read: {type(error).__name__}"
        raise WeftError(Reason.INTERNAL, message) from None
    params = with_known_tools(params, items)
    return BackgroundRequest(params=params, items=items, warnings=warnings, envelope=envelope)


def origin_of(
    raw: bytes,
    own: Sequence[InputItem],
    resolved: Sequence[InputItem],
    warnings: Sequence[warning_pb2.Warning],
    envelope: ResponseEnvelope = ResponseEnvelope.OPENAI,
) -> bytes:
    """Returns the origin of a request. `own`: its input; `resolved`: its input with resolved references.

    `envelope`: the form of the response if the request names none.
    """
    items = _NONE
    if any(item.kind == _REFERENCE for item in own):
        items = msgspec.Raw(msgspec.json.encode([item.model_dump(mode="json", exclude_none=True) for item in resolved]))
    encoded = [warning.SerializeToString(deterministic=True) for warning in warnings]
    return msgspec.json.encode(_Origin(body=msgspec.Raw(raw), items=items, warnings=encoded, envelope=envelope.value))


_FIELD = "previous_response_id"
READ_SECONDS = 5.0
"""Maximum time to read one complete response."""
_STORED_STATES = frozenset({task_pb2.TASK_STATE_COMPLETED, task_pb2.TASK_STATE_CANCELLED})
"""States with stored responses; failed ones are not stored beyond their task, as elsewhere."""

PassTurn = Callable[[str], Awaitable[None]]
Submit = Callable[[], Awaitable["BackgroundResponse"]]
log = get_logger("weft.gateway")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundResponse:
    """One background response."""

    task: task_pb2.Task
    """The task, as read from the store."""
    request: BackgroundRequest

    @property
    def id(self) -> str:
        """The response's id."""
        return background_response_id(self.task.id)


@dataclass(slots=True)
class StreamPosition:
    """The position in a stream."""

    number: int = 0
    """The sequence number of its last event."""

    def broken_off(self, error: WeftError, request_id: str) -> bytes:
        """Returns the last event of a broken stream whose response continues; it is not an event of the response."""
        return error_event(error, request_id, self.number)


class BackgroundResponses:
    """Background responses over the task port and the response store."""

    def __init__(
        self,
        tasks: TaskClient,
        store: ResponseClient,
        clock: Clock,
        watches: EventWatches,
        summaries: SealedTexts | None = None,
    ) -> None:
        """`summaries`: seals those that are compacted conversations."""
        self.watches = watches
        """Limits their open streams."""
        self._summaries = summaries
        self._tasks = tasks
        self._store = store
        self._clock = clock

    async def submit(self, work: Work, origin: bytes, pass_turn: PassTurn | None = None) -> BackgroundResponse:
        """Submits a translated request, which is then durable. Raises as `supply` and `TaskClient.submit`.

        `pass_turn`: makes the task the holder of the conversation, if any.
        """
        context, payload = work.context, work.payload
        assert isinstance(payload, chat_pb2.ChatPayload)
        if work.media is not None:
            await supply(payload, work.media, work.deps.media)
        key = idempotency_key_of(headers_of(work.scope))
        spec = task_spec(context, payload, origin=origin, origin_kind=BACKGROUND_KIND)
        if key:
            # The trace context differs on every retry of the request.
            spec.traceparent = ""
        request = task_service_pb2.SubmitTaskRequest(spec=spec, idempotency_key=key)
        try:
            submitted = await self._tasks.submit(context.tenant, request, caller=context.caller)
        except WeftError as error:
            raise of_request(error) from None
        log.info("submitted", response_id=background_response_id(submitted.task.id), existed=submitted.existed)
        facts_of(work.scope).task_id = submitted.task.id
        if pass_turn is not None:
            await pass_turn(submitted.task.id)
        return self._response_of(submitted.task, origin)

    async def find(self, tenant: str, response_id: str) -> BackgroundResponse:
        """Returns a response of the tenant. Raises NOT_FOUND."""
        task_id = task_of(response_id)
        if task_id is None:
            raise response_not_found(response_id)
        details = await found_or_none(self._tasks.details(tenant, task_id))
        if details is None or details.task.origin_kind != BACKGROUND_KIND:
            raise response_not_found(response_id)
        return self._response_of(details.task, details.spec.origin)

    async def body(self, found: BackgroundResponse) -> bytes:
        """Returns the current response as JSON; stores it if it has ended."""
        task, body = await self._rendered(found)
        await self._store_if_ended(found, task, body)
        return body

    async def cancel(self, found: BackgroundResponse) -> bytes:
        """Cancels it, idempotently. Raises INVALID_ARGUMENT if it ended otherwise."""
        task = found.task
        if not is_terminal(task):
            task = await self._tasks.cancel(task.tenant, task.id)
        if task.state in {task_pb2.TASK_STATE_COMPLETED, task_pb2.TASK_STATE_FAILED}:
            raise invalid_field("response_id", f"response {found.id} has ended and cannot be cancelled")
        return await self.body(replace(found, task=task))

    async def delete(self, found: BackgroundResponse) -> None:
        """Deletes its task. Raises RESOURCE_IN_USE if it is running."""
        if not is_terminal(found.task):
            raise WeftError(Reason.RESOURCE_IN_USE, f"response {found.id} is running; cancel it first")
        if found.request.params.conversation is not None:
            # Its conversation keeps its items.
            await self.body(found)
        await self._tasks.delete(found.task.tenant, found.task.id)

    async def get(self, tenant: str, response_id: str) -> StoredResponse:
        """Returns a response of any kind, to continue it. Raises NOT_FOUND, also if it cannot be continued."""
        stored = await found_or_none(self._store.get(tenant, response_id))
        if stored is not None:
            return stored
        try:
            return await self._ended(tenant, response_id)
        except WeftError as error:
            if error.reason is Reason.INVALID_ARGUMENT:
                raise response_not_found(response_id) from None
            raise

    async def chain(self, tenant: str, response_id: str) -> Sequence[StoredResponse]:
        """Returns the chain of a response of any kind; see `ResponseClient.chain`.

        Raises INVALID_ARGUMENT for a background response that cannot be continued.
        """
        stored = await found_or_none(self._store.chain(tenant, response_id))
        if stored is not None:
            return stored
        # Earlier responses were stored when this one was submitted: one that is missing was deleted, or has expired.
        if await found_or_none(self._store.get(tenant, response_id)) is None:
            await self._ended(tenant, response_id)
        return await self._store.chain(tenant, response_id)

    async def _ended(self, tenant: str, response_id: str) -> StoredResponse:
        """Returns an ended response to continue; stores it first.

        Raises NOT_FOUND, INVALID_ARGUMENT if it is running or has failed, and as `ResponseClient.save`.
        """
        found = await self.find(tenant, response_id)
        task, body = await self._rendered(found)
        if not is_terminal(task):
            raise invalid_field(_FIELD, f"names {response_id}, which is still running; wait for its end")
        if task.state not in _STORED_STATES:
            raise invalid_field(_FIELD, f"names {response_id}, which failed and cannot be continued")
        stored = _stored(found, task, body)
        await self._save(stored, task)
        return stored

    async def follow(
        self,
        found: BackgroundResponse,
        position: StreamPosition,
        *,
        starting_after: int = FROM_THE_START,
        is_new: bool = False,
    ) -> AsyncGenerator[bytes]:
        """Yields its events after a sequence number; the response is stored before its last event.

        `position` is updated. `is_new`: the caller learns the id from the first event, which is then always sent.
        Raises INVALID_ARGUMENT naming `starting_after`, WORKER_LOST if the answer restarts, and as `TaskClient.watch`;
        the response continues in each case.
        """
        if starting_after != FROM_THE_START:
            require_resumable(found.task, starting_after)
        replay = Replay(found.request, found.task, self._clock, starting_after=starting_after)
        held = replay.opening()
        if is_new:
            yield held
            position.number = replay.last_number
            held = b""
        async with aclosing(self._events(found, replay)) as events:
            async for data in events:
                number = replay.last_number
                if held or data:
                    yield held + data
                    held = b""
                # Only after the write: an event may be sent twice, but is never lost.
                position.number = number

    async def _events(self, found: BackgroundResponse, replay: Replay) -> AsyncGenerator[bytes]:
        async with aclosing(self._tasks.watch(found.task.tenant, found.task.id)) as watch:
            async for update in watch:
                data = replay.take(update)
                if replay.is_done:
                    await self._store_if_ended(found, replay.task, replay.snapshot())
                yield data
                if replay.is_done:
                    return
        last = replay.end()
        if not replay.is_done:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "the stream was interrupted; the response continues")
        await self._store_if_ended(found, replay.task, replay.snapshot())
        yield last

    async def _rendered(self, found: BackgroundResponse) -> tuple[task_pb2.Task, bytes]:
        """Returns the current task, and its response."""
        if found.task.state == task_pb2.TASK_STATE_PENDING:
            return found.task, self._fresh(found).snapshot()
        try:
            async with asyncio.timeout(READ_SECONDS):
                replay = await found_or_none(self._replayed(found))
        except TimeoutError:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "task store timed out") from None
        if replay is None:
            raise response_not_found(found.id)
        return replay.task, replay.snapshot()

    async def _replayed(self, found: BackgroundResponse) -> Replay:
        replay = self._fresh(found)
        async with aclosing(self._tasks.watch(found.task.tenant, found.task.id)) as watch:
            async for update in watch:
                try:
                    replay.take(update)
                except WeftError:
                    # Another attempt began in the meantime.
                    replay = self._fresh(found)
                    replay.take(update)
                if replay.is_current:
                    break
        replay.end()
        if is_terminal(replay.task) and not replay.is_done:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "the response could not be read completely; try again")
        return replay

    def _fresh(self, found: BackgroundResponse) -> Replay:
        return Replay(found.request, found.task, self._clock)

    async def _store_if_ended(self, found: BackgroundResponse, task: task_pb2.Task, body: bytes) -> None:
        stored = _stored(found, task, body)
        try:
            if is_terminal(task):
                await self._end_turn(found, stored)
            if task.state in _STORED_STATES:
                await self._save(stored, task)
        except WeftError as error:
            # The response can still be rendered from its task.
            log.warning("response not stored yet", response_id=found.id, reason=error.reason.name.lower())

    async def _end_turn(self, found: BackgroundResponse, stored: StoredResponse) -> None:
        """Adds a response that has ended to its conversation, once: its task then holds that no longer."""
        name = found.request.params.conversation
        record = None if name is None else await found_or_none(self._store.get(stored.tenant, name))
        if record is not None and record.holder == found.task.id:
            record.items = with_response(record.items, stored.items, stored.body)
            record.create_time.CopyFrom(stamp_of(self._clock.utc_now()))
            await self._store.save(record, holder=record.holder)

    async def _save(self, stored: StoredResponse, task: task_pb2.Task) -> None:
        """Stores it unless it is stored. Raises as `ResponseClient.save`, and NOT_FOUND if it was deleted."""
        if await found_or_none(self._store.get(stored.tenant, stored.id)) is not None:
            return
        await self._store.save(stored)
        # Deletion removes the task first: a response read before that must not be stored after it.
        if await self._is_deleted(task):
            await self._store.delete(stored.tenant, stored.id)
            raise response_not_found(stored.id)

    def _response_of(self, task: task_pb2.Task, origin: bytes) -> BackgroundResponse:
        request = read_origin(origin, task.id)
        conversation = Conversation(request.items, seal=seal_of(self._summaries, task.tenant))
        return BackgroundResponse(task=copy_of(task), request=replace(request, seal=conversation.seal_of_answer))

    async def _is_deleted(self, task: task_pb2.Task) -> bool:
        with suppress(WeftError):
            return await found_or_none(self._tasks.get(task.tenant, task.id)) is None
        return False


def _stored(found: BackgroundResponse, task: task_pb2.Task, body: bytes) -> StoredResponse:
    return StoredResponse(
        id=found.id,
        tenant=task.tenant,
        previous_id=found.request.params.previous_response_id or "",
        create_time=task.create_time,
        body=body,
        items=items_to_store(found.request.items, found.id),
    )


def answered(background: BackgroundResponses, work: Work, submit: Submit) -> Response:
    """Returns a background response once `submit` has made its task durable."""

    async def produce() -> JsonAnswer:
        return JsonAnswer(await background.body(await submit()), [])

    return UnaryAnswer(produce, cut_off_seconds=cut_off_seconds(work.deps, work.context))


def followed(background: BackgroundResponses, deps: GatewayDeps, submit: Submit) -> Response:
    """Returns the event stream of a new background response. A disconnect does not cancel it."""
    position = StreamPosition()

    async def events() -> AsyncGenerator[bytes]:
        found = await submit()
        async with aclosing(background.follow(found, position, is_new=True)) as events:
            async for data in events:
                yield data

    return EventStream(deps, events(), watches=background.watches, failure=position.broken_off)


def require_possible(params: ResponsesRequest) -> None:
    """Raises INVALID_ARGUMENT naming the field if a request cannot run in the background."""
    if params.store is False:
        raise invalid_field("store", "must not be false with 'background': background responses are stored")
    if params.durable is not None:
        raise invalid_field("durable", "must not be combined with 'background', which is always durable")
