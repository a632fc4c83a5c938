"""Responses in the background: tasks, in the words of the Responses API.

The response's id leads to its task (see `gateway.responses.output`), and everything else is rendered from what
is kept of the task, by any gateway. Whoever first sees its end keeps the response as others are kept, so that it
outlives its task; until then it can be continued all the same.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
import structlog
from pydantic import TypeAdapter, ValidationError
from starlette.responses import Response
from starlette.types import Scope

from gateway.answers.event_stream import EventStream
from gateway.answers.unary import JsonAnswer, UnaryAnswer, cut_off_seconds
from gateway.deps import GatewayDeps
from gateway.http.event_watches import EventWatches
from gateway.intake.headers import headers_of, idempotency_key_of
from gateway.media import RequestMedia, supply
from gateway.request_facts import facts_of
from gateway.responses.history import items_to_keep
from gateway.responses.output import background_response_id, task_of
from gateway.responses.payload import own_items
from gateway.responses.replay import FROM_THE_START, BackgroundRequest, Replay, require_resumable
from gateway.responses.schema import InputItem, Items, ResponsesRequest
from gateway.responses.stream import error_event
from weft.api.common.v1 import chat_pb2, warning_pb2
from weft.dispatch.request_trace import RequestContext
from weft.durable.durable_call import of_request, task_spec
from weft.durable.responses import ResponseStore, StoredResponse, response_not_found
from weft.durable.tasks import NewTask, Task, TaskPort, TaskState
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason

ORIGIN_KIND = "responses.background"
"""`TaskSpec.origin_kind` of a response in the background."""
_REFERENCE = "item_reference"

_items = TypeAdapter(Items)


_NONE = msgspec.Raw(b"")
"""In place of items: those of the body are as they were."""


class _Origin(msgspec.Struct, omit_defaults=True):
    body: msgspec.Raw
    items: msgspec.Raw = _NONE
    warnings: list[bytes] = []


class ReadOrigin:
    """An origin, read."""

    def __init__(self, raw: bytes, task_id: str) -> None:
        """Raises INTERNAL where it cannot be read; `task_id` says whose it is."""
        try:
            origin = msgspec.json.decode(raw, type=_Origin)
            params = ResponsesRequest.model_validate_json(bytes(origin.body))
            self.items: Sequence[InputItem] = (
                _items.validate_json(bytes(origin.items)) if bytes(origin.items) else own_items(params)
            )
            warnings = [warning_pb2.Warning.FromString(each) for each in origin.warnings]
        except (msgspec.MsgspecError, ValidationError, WeftError) as error:
            message = f"the request of task {task_id} cannot be read: {type(error).__name__}"
            raise WeftError(Reason.INTERNAL, message) from None
        self.request = BackgroundRequest(params=params, warnings=warnings)


def origin_of(
    raw: bytes, own: Sequence[InputItem], resolved: Sequence[InputItem], warnings: Sequence[warning_pb2.Warning]
) -> bytes:
    """The origin of a request. `own`: its input; `resolved`: the same, references replaced by what they name."""
    items = _NONE
    if any(item.kind == _REFERENCE for item in own):
        told = [item.model_dump(mode="json", exclude_none=True) for item in resolved]
        items = msgspec.Raw(msgspec.json.encode(told))
    encoded = [warning.SerializeToString(deterministic=True) for warning in warnings]
    return msgspec.json.encode(_Origin(body=msgspec.Raw(raw), items=items, warnings=encoded))


_KEPT_STATES = frozenset({TaskState.COMPLETED, TaskState.CANCELLED})
"""As with other responses: those that failed are not kept beyond their task."""

log = structlog.get_logger("weft.gateway")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundResponse:
    """One of them."""

    id: str
    task: Task
    """As it was when it was found."""
    origin: ReadOrigin


@dataclass(slots=True)
class StreamPosition:
    """How far a stream has come."""

    number: int = 0
    """The sequence number of its last event."""

    def broken_off(self, error: WeftError, request_id: str) -> bytes:
        """The last event of a stream whose response goes on: none of the response's, so it has no number of its own."""
        return error_event(error, request_id, self.number)


class BackgroundResponses:
    """Those that whoever runs tasks knows of."""

    def __init__(self, tasks: TaskPort, store: ResponseStore, clock: Clock, *, timeout_seconds: float) -> None:
        """`tasks` answers in time; `timeout_seconds`: how long it may take to read one whole response."""
        self._tasks = tasks
        self._store = store
        self._clock = clock
        self._timeout_seconds = timeout_seconds

    async def submit(self, new: NewTask) -> BackgroundResponse:
        """Begin one; it is durable. Raises as `TaskPort.submit`."""
        try:
            submitted = await self._tasks.submit(new)
        except WeftError as error:
            raise of_request(error) from None
        log.info("submitted", response_id=background_response_id(submitted.task.id), existed=submitted.existed)
        return _response_of(submitted.task, new.spec.origin)

    async def find(self, tenant: str, response_id: str) -> BackgroundResponse:
        """One of the tenant's. Raises NOT_FOUND."""
        task_id = task_of(response_id)
        if task_id is None:
            raise response_not_found(response_id)
        try:
            details = await self._tasks.details(tenant, task_id)
        except WeftError as error:
            if error.reason is Reason.NOT_FOUND:
                raise response_not_found(response_id) from None
            raise
        if details.task.origin_kind != ORIGIN_KIND:
            raise response_not_found(response_id)
        return _response_of(details.task, details.spec.origin)

    async def body(self, found: BackgroundResponse) -> bytes:
        """It as it is, as JSON; kept, where it is at its end."""
        task, body = await self._rendered(found)
        await self._keep(found, task, body)
        return body

    async def cancel(self, found: BackgroundResponse) -> bytes:
        """End it; one that was cancelled stays so. Raises INVALID_ARGUMENT for one that came to another end."""
        task = found.task
        if not task.state.is_terminal:
            task = await self._tasks.cancel(task.tenant, task.id)
        if task.state in {TaskState.COMPLETED, TaskState.FAILED}:
            raise invalid_field("response_id", f"response {found.id} has come to its end and cannot be cancelled")
        return await self.body(BackgroundResponse(id=found.id, task=task, origin=found.origin))

    async def delete(self, found: BackgroundResponse) -> None:
        """Forget its task. Raises RESOURCE_IN_USE for one that is not at its end."""
        if not found.task.state.is_terminal:
            raise WeftError(Reason.RESOURCE_IN_USE, f"response {found.id} is under way; cancel it first")
        await self._tasks.delete(found.task.tenant, found.task.id)

    async def kept(self, tenant: str, response_id: str, field: str) -> StoredResponse:
        """One at its end, to be continued; it is kept by then.

        Raises NOT_FOUND, INVALID_ARGUMENT naming `field` for one that is under way or failed, and as
        `ResponseStore.save`.
        """
        found = await self.find(tenant, response_id)
        task, body = await self._rendered(found)
        if not task.state.is_terminal:
            raise invalid_field(field, f"names {response_id}, which is not at its end; wait for it")
        if task.state not in _KEPT_STATES:
            raise invalid_field(field, f"names {response_id}, which failed and cannot be continued")
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
        """Its events after a sequence number, to its end; it is kept before its last event is given.

        `position` is kept up. `is_new`: whether its caller learns its id from the first event: that comes whatever
        happens. Raises INVALID_ARGUMENT naming `starting_after`, WORKER_LOST where the answer starts again, and as
        `TaskPort.watch`; the response goes on then.
        """
        if starting_after != FROM_THE_START:
            require_resumable(found.task, starting_after)
        replay = Replay(found.origin.request, found.task, self._clock, starting_after=starting_after)
        held = replay.opening()
        if is_new:
            yield held
            position.number = replay.last_number
            held = b""
        async with aclosing(self._events(found, replay)) as events:
            async for told in events:
                number = replay.last_number
                if held or told:
                    yield held + told
                    held = b""
                # Not before it is written: rather an event twice than one never.
                position.number = number

    async def _events(self, found: BackgroundResponse, replay: Replay) -> AsyncGenerator[bytes]:
        async with aclosing(self._tasks.watch(found.task.tenant, found.task.id)) as watch:
            async for news in watch:
                told = replay.take(news)
                if replay.is_done:
                    await self._keep(found, replay.task, replay.snapshot())
                yield told
                if replay.is_done:
                    return
        last = replay.end()
        if not replay.is_done:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "the stream broke off; the response goes on")
        await self._keep(found, replay.task, replay.snapshot())
        yield last

    async def _rendered(self, found: BackgroundResponse) -> tuple[Task, bytes]:
        """The task as it is, and its response."""
        if found.task.state is TaskState.PENDING:
            return found.task, self._fresh(found).snapshot()
        try:
            async with asyncio.timeout(self._timeout_seconds):
                replay = await self._replayed(found)
        except TimeoutError:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "task store timed out") from None
        except WeftError as error:
            if error.reason is Reason.NOT_FOUND:
                raise response_not_found(found.id) from None
            raise
        return replay.task, replay.snapshot()

    async def _replayed(self, found: BackgroundResponse) -> Replay:
        replay = self._fresh(found)
        async with aclosing(self._tasks.watch(found.task.tenant, found.task.id)) as watch:
            async for news in watch:
                try:
                    replay.take(news)
                except WeftError:
                    # Another attempt began meanwhile.
                    replay = self._fresh(found)
                    replay.take(news)
                if replay.is_current:
                    break
        replay.end()
        if replay.task.state.is_terminal and not replay.is_done:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "the response could not be read to its end; ask again")
        return replay

    def _fresh(self, found: BackgroundResponse) -> Replay:
        return Replay(found.origin.request, found.task, self._clock)

    async def _keep(self, found: BackgroundResponse, task: Task, body: bytes) -> None:
        if task.state not in _KEPT_STATES:
            return
        try:
            await self._save(_stored(found, task, body), task)
        except WeftError as error:
            # Nothing is lost: it is rendered from its task as long as that is kept.
            log.warning("response not kept yet", response_id=found.id, reason=error.reason.name.lower())

    async def _save(self, stored: StoredResponse, task: Task) -> None:
        """Keep it, unless it is kept already. Raises as `ResponseStore.save`, NOT_FOUND for one that is forgotten."""
        if await self._is_kept(stored):
            return
        await self._store.save(stored)
        # Whoever deletes a response forgets its task first: what was read before that must not come back after it.
        if await self._is_forgotten(task):
            await self._store.delete(stored.tenant, stored.id)
            raise response_not_found(stored.id)

    async def _is_kept(self, stored: StoredResponse) -> bool:
        try:
            await self._store.get(stored.tenant, stored.id)
        except WeftError as error:
            if error.reason is Reason.NOT_FOUND:
                return False
            raise
        return True

    async def _is_forgotten(self, task: Task) -> bool:
        try:
            await self._tasks.get(task.tenant, task.id)
        except WeftError as error:
            return error.reason is Reason.NOT_FOUND
        return False


def _response_of(task: Task, origin: bytes) -> BackgroundResponse:
    return BackgroundResponse(id=background_response_id(task.id), task=task, origin=ReadOrigin(origin, task.id))


def _stored(found: BackgroundResponse, task: Task, body: bytes) -> StoredResponse:
    return StoredResponse(
        id=found.id,
        tenant=task.tenant,
        previous_id=found.origin.request.params.previous_response_id or "",
        created_at=task.created_at,
        body=body,
        items=items_to_keep(found.origin.items, found.id),
    )


_FIELD = "previous_response_id"


class ContinuedResponses:
    """A ResponseStore that keeps a response in the background when it is asked for, if it is at its end."""

    def __init__(self, store: ResponseStore, background: BackgroundResponses) -> None:
        self._store = store
        self._background = background

    async def save(self, response: StoredResponse) -> None:
        """See ResponseStore.save."""
        await self._store.save(response)

    async def get(self, tenant: str, response_id: str) -> StoredResponse:
        """See ResponseStore.get. One that cannot be continued is NOT_FOUND."""
        try:
            return await self._store.get(tenant, response_id)
        except WeftError as missing:
            if missing.reason is not Reason.NOT_FOUND:
                raise
        try:
            return await self._background.kept(tenant, response_id, _FIELD)
        except WeftError as error:
            if error.reason is Reason.INVALID_ARGUMENT:
                raise response_not_found(response_id) from None
            raise

    async def chain(self, tenant: str, response_id: str) -> Sequence[StoredResponse]:
        """See ResponseStore.chain. Raises INVALID_ARGUMENT for one in the background that cannot be continued."""
        try:
            return await self._store.chain(tenant, response_id)
        except WeftError as error:
            if error.reason is not Reason.NOT_FOUND:
                raise
        # Those before it were kept when it was asked for: only the last can be missing.
        await self._background.kept(tenant, response_id, _FIELD)
        return await self._store.chain(tenant, response_id)

    async def delete(self, tenant: str, response_id: str) -> None:
        """See ResponseStore.delete."""
        await self._store.delete(tenant, response_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundDeps:
    """What responses in the background need."""

    responses: BackgroundResponses
    watches: EventWatches
    """Streams of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A translated request that nobody has to wait for."""

    deps: GatewayDeps
    background: BackgroundDeps
    scope: Scope
    context: RequestContext
    payload: chat_pb2.ChatPayload
    media: RequestMedia
    """What of the payload is still to be fetched."""
    origin: bytes

    def whole(self) -> Response:
        """The response as it is once its task is durable."""

        async def produce() -> JsonAnswer:
            found = await self._submitted()
            return JsonAnswer(await self.background.responses.body(found), [])

        return UnaryAnswer(produce, cut_off_seconds=cut_off_seconds(self.deps, self.context))

    def streamed(self) -> Response:
        """Its events from the first on. A caller who leaves does not end it."""
        position = StreamPosition()

        async def events() -> AsyncGenerator[bytes]:
            found = await self._submitted()
            async with aclosing(self.background.responses.follow(found, position, is_new=True)) as followed:
                async for told in followed:
                    yield told

        return EventStream(self.deps, events(), watches=self.background.watches, failure=position.broken_off)

    async def _submitted(self) -> BackgroundResponse:
        await supply(self.payload, self.media, self.deps.media)
        key = idempotency_key_of(headers_of(self.scope))
        spec = task_spec(self.context, self.payload, origin=self.origin, origin_kind=ORIGIN_KIND)
        if key:
            # The same request comes with another trace each time.
            spec.traceparent = ""
        new = NewTask(tenant=self.context.tenant, spec=spec, idempotency_key=key, caller=self.context.caller)
        found = await self.background.responses.submit(new)
        facts_of(self.scope).task_id = found.task.id
        return found


def require_background(
    params: ResponsesRequest, context: RequestContext, background: BackgroundDeps | None
) -> BackgroundDeps:
    """Raises INVALID_ARGUMENT naming the field where a request for the background cannot be had."""
    if background is None:
        raise invalid_field("background", "must be false: there are no responses in the background here")
    if params.store is False:
        raise invalid_field("store", "must not be false with 'background': what nobody waits for has to be kept")
    if context.journal is not None:
        raise invalid_field("durable", "must not stand beside 'background', which is durable anyway")
    return background
