"""/v1/conversations: records of the response store that grow by the items of responses and callers.

One writer at a time holds a conversation: a live response while it is answered, a task until its end was seen.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from gateway.answers.answer_builder import with_warnings
from gateway.answers.compaction import seal_of
from gateway.answers.unary import json_response, list_after, list_json
from gateway.errors import DetailedError
from gateway.gateway_config import KeepResponses
from gateway.intake.body import body_of
from gateway.intake.headers import tenant_of
from gateway.intake.query import Query, begin_owned
from gateway.intake.request_model import StrictModel
from gateway.media import RequestMedia
from gateway.openai.chat_builder import ChatBuilder
from gateway.openai.extension_fields import unknown_fields
from gateway.request_facts import facts_of
from gateway.responses.compaction_items import KINDS, TRIGGER, remaining
from gateway.responses.history import items_to_store, joined, with_response
from gateway.responses.input_items import ItemReader
from gateway.responses.output import is_conversation, new_response_id
from gateway.responses.retrieval import Responses, Stored
from gateway.responses.schema import ConversationItems, ConversationMetadata, ConversationRequest, InputItem
from weft.api.router.v1.stored_response_service_pb2 import StoredResponse
from weft.durable.responses import ResponseClient, background_response_id
from weft.durable.tasks import TASK_PREFIX
from weft.kernel.errors.error_tree import FieldError, WeftError, found_or_none, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import Clock
from weft.kernel.time.timestamps import stamp_of

FIELD = "conversation"
MAX_CONVERSATION_BYTES = 12 * 1024 * 1024
"""Maximum size of a conversation's items and a request that adds to them; the store has room for the answer, too."""
HOLD_SECONDS = 30.0
"""Time after which a conversation is free if the process of its writer died."""
MAX_LISTED, DEFAULT_LISTED = 100, 20
LIST_PARAMETERS = ("limit", "order", "after", "include")
_SURFACE = "conversations"


@dataclass(slots=True)
class Turn:
    """One writer's turn, during which it holds a conversation."""

    store: ResponseClient
    clock: Clock
    record: StoredResponse
    """The conversation as held."""
    _is_over: bool = False
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def save(self, items: bytes, body: bytes = b"") -> None:
        """Stores the conversation and ends the turn. `body`: empty: it is the same. Raises as `ResponseClient.save`."""
        record = self.record
        record.items, record.body = items, body or record.body
        # It is kept from its last change on.
        record.create_time.CopyFrom(stamp_of(self.clock.utc_now()))
        async with self._lock:
            self._is_over = True
            await self.store.save(record, holder=record.holder)

    async def add(self, items: bytes, response: bytes) -> list[dict[str, object]]:
        """Adds a response that has ended, and ends the turn; returns warnings. A failure is that of the response."""
        try:
            await self.save(with_response(self.record.items, items, response))
        except WeftError as error:
            if error.reason is not Reason.NOT_FOUND:
                raise
            message = "the conversation was deleted in the meantime; nothing was added to it"
            return [{"code": "not_stored", "field": FIELD, "message": message}]
        return []

    async def pass_to(self, task_id: str) -> None:
        """Passes the conversation to a task, which holds it until its end."""
        async with self._lock:
            self._is_over = True
            await self.store.hold(self.record.tenant, self.record.id, task_id, None, former=self.record.holder)

    async def hold(self, seconds: float) -> None:
        """Extends the turn; with 0 ends it."""
        async with self._lock:
            if not self._is_over:
                with suppress(WeftError):
                    await self.store.hold(self.record.tenant, self.record.id, self.record.holder, seconds)


@asynccontextmanager
async def turn_in(responses: Responses, tenant: str, name: str) -> AsyncGenerator[Turn]:
    """A turn in a conversation. Raises NOT_FOUND, and `conversation_locked`, as OpenAI does, during another one."""
    store, clock, holder = _store(responses), responses.deps.clock, new_response_id()
    await find(responses, tenant, name)
    try:
        await store.hold(tenant, name, holder, HOLD_SECONDS)
    except WeftError as error:
        if error.reason is not Reason.RESOURCE_IN_USE:
            raise
        words = f"{FIELD}: another response of it is running, or it is being changed; try again later"
        locked = DetailedError(Reason.INVALID_ARGUMENT, words, code="conversation_locked")
        locked.metadata["field"] = FIELD
        raise locked from None
    record = await store.get(tenant, name)
    record.holder = holder
    turn = Turn(store, clock, record)

    async def renew() -> None:
        while True:
            await clock.sleep(HOLD_SECONDS / 3)
            await turn.hold(HOLD_SECONDS)

    renewing = asyncio.create_task(renew())
    try:
        yield turn
    finally:
        renewing.cancel()
        await turn.hold(0.0)


@dataclass(eq=False)
class InTurn(Response):
    """A response that is made and sent during its turn in a conversation."""

    turn: AbstractAsyncContextManager[Turn]
    make: Callable[[Turn], Awaitable[Response]]

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.turn as turn:
            await (await self.make(turn))(scope, receive, send)


NewConversation = Annotated[ConversationRequest, body_of(ConversationRequest)]
NewMetadata = Annotated[ConversationMetadata, body_of(ConversationMetadata)]
NewItems = Annotated[ConversationItems, body_of(ConversationItems)]


async def create(responses: Stored, request: Request, params: NewConversation) -> Response:
    """Creates a conversation, with up to 20 items."""
    facts_of(request.scope).surface = _SURFACE
    tenant, now, name = tenant_of(request.scope), responses.deps.clock.utc_now(), f"conv_{secrets.token_hex(12)}"
    responses.deps.count(request.scope, tenant)
    fields = {"id": name, "object": FIELD, "created_at": int(now.timestamp()), "metadata": params.metadata or {}}
    record = StoredResponse(id=name, tenant=tenant, create_time=stamp_of(now), items=b"[]")
    record.items, record.body = _new_items(responses, record, params.items or []), msgspec.json.encode(fields)
    await _store(responses).save(record)
    return _shown(record.body, params)


async def get(responses: Stored, request: Request) -> Response:
    """Returns a conversation."""
    return _shown((await find(responses, *_named(request))).body)


async def update(responses: Stored, request: Request, params: NewMetadata) -> Response:
    """Replaces the metadata of a conversation."""
    async with _changing(responses, request) as turn:
        body = msgspec.json.encode(msgspec.json.decode(turn.record.body) | {"metadata": params.metadata or {}})
        await turn.save(turn.record.items, body)
    return _shown(body, params)


async def delete(responses: Stored, request: Request) -> Response:
    """Deletes a conversation with its items. A response of it that is running ends, and is not added to it."""
    tenant, name = _named(request)
    await find(responses, tenant, name)
    await _store(responses).delete(tenant, name)
    return json_response({"id": name, "object": "conversation.deleted", "deleted": True})


async def create_items(responses: Stored, request: Request, params: NewItems) -> Response:
    """Adds up to 20 items to a conversation."""
    async with _changing(responses, request) as turn:
        new = _new_items(responses, turn.record, params.items)
        await turn.save(joined(turn.record.items, new))
    return json_response(list_json(_items_of(new), has_more=False), warnings=unknown_fields(params))


async def list_items(responses: Stored, request: Request) -> Response:
    """Lists the items of a conversation, last item first."""
    items = _items_of((await find(responses, *_named(request))).items)
    return page_of(request, items, "names no item of this conversation")


def page_of(request: Request, items: Sequence[dict[str, Any]], unknown: str) -> Response:
    """Returns a page of items, last item first. `unknown`: the message for an item that is not among them."""
    query = Query(request.scope, known=None)
    ordered = items if query.is_ascending() else items[::-1]
    limit = query.count("limit", MAX_LISTED, padded=False) or DEFAULT_LISTED
    after = query.text("after") if "after" in query else None
    return json_response(list_after(ordered, after, limit, unknown))


async def get_item(responses: Stored, request: Request) -> Response:
    """Returns an item of a conversation."""
    items = _items_of((await find(responses, *_named(request))).items)
    return json_response(items[_index(items, request)])


async def delete_item(responses: Stored, request: Request) -> Response:
    """Deletes an item of a conversation; returns the conversation."""
    async with _changing(responses, request) as turn:
        items = msgspec.json.decode(turn.record.items)
        del items[_index(items, request)]
        await turn.save(msgspec.json.encode(items))
    return _shown(turn.record.body)


async def find(responses: Responses, tenant: str, name: str) -> StoredResponse:
    """Returns a conversation, with a background response of it that has ended. Raises NOT_FOUND."""
    store, background = _store(responses), responses.background
    record = await found_or_none(store.get(tenant, name)) if is_conversation(name) else None
    if record is None:
        raise FieldError(FIELD, f"there is none with the id {name}", Reason.NOT_FOUND)
    if background is None or not record.holder.startswith(f"{TASK_PREFIX}-"):
        return record
    response = await found_or_none(background.find(tenant, background_response_id(record.holder)))
    if response is None:
        await store.hold(tenant, name, record.holder, 0.0)
    else:
        await background.body(response)
    return await store.get(tenant, name)


def require_room(responses: Responses, record: StoredResponse, items: Sequence[InputItem], at: str, size: int) -> None:
    """Raises INVALID_ARGUMENT if new items, in the field `at`, of `size` bytes, do not fit or have an id of another."""
    before, most = _items_of(record.items), responses.deps.config.limits.max_messages
    if len(before) + len(items) > most or len(record.items) + size > MAX_CONVERSATION_BYTES:
        limit = f"{most} items (gateway.limits.max_messages) and {MAX_CONVERSATION_BYTES} bytes"
        raise invalid_field(FIELD, f"is full: a conversation has at most {limit}; begin another one")
    if {item["id"] for item in before} & {item.id for item in items}:
        raise invalid_field(at, "has an item with the id of one that is in the conversation")


def _new_items(responses: Responses, record: StoredResponse, items: Sequence[InputItem]) -> bytes:
    """Returns items as JSON to store. Raises INVALID_ARGUMENT naming one that no model could be given."""
    deps, entries = responses.deps, [(f"items[{index}]", item) for index, item in enumerate(items)]
    for place, item in entries:
        if item.kind in {TRIGGER, "item_reference"}:
            raise invalid_field(f"{place}.type", f"must not be '{item.kind}', which is for the input of a response")
    read = remaining(entries, seal_of(deps.summaries, record.tenant))
    # As items of an earlier turn, of which a call or more may be in the conversation.
    later = InputItem(role="assistant", content=""), InputItem(role="user", content="")
    chat = ChatBuilder(deps.config.limits, RequestMedia(deps.config.media))
    reader = ItemReader(chat, [*(item for _, item in read), *later])
    for place, item in read:
        reader.add(item, place)
    new = items_to_store(items, new_response_id())
    require_room(responses, record, items, "items", len(new))
    return new


def _store(responses: Responses) -> ResponseClient:
    if responses.store is None or responses.keeps is KeepResponses.NEVER:
        raise WeftError(Reason.UNSUPPORTED_OPERATION, "this gateway stores no conversations (gateway.keep_responses)")
    return responses.store


def _named(request: Request) -> tuple[str, str]:
    return begin_owned(request, _SURFACE, "conversation_id")


def _changing(responses: Responses, request: Request) -> AbstractAsyncContextManager[Turn]:
    tenant, name = _named(request)
    responses.deps.count(request.scope, tenant)
    return turn_in(responses, tenant, name)


def _items_of(raw: bytes) -> list[dict[str, Any]]:
    """Returns stored items as shown."""
    items: list[dict[str, Any]] = msgspec.json.decode(raw)
    return [item if item["type"] in KINDS else {"status": "completed"} | item for item in items]


def _index(items: Sequence[dict[str, Any]], request: Request) -> int:
    wanted = request.path_params["item_id"]
    found = next((index for index, item in enumerate(items) if item["id"] == wanted), None)
    if found is None:
        raise FieldError("item_id", "names no item of this conversation", Reason.NOT_FOUND)
    return found


def _shown(body: bytes, params: StrictModel | None = None) -> Response:
    """Returns a stored conversation, with warnings about unknown fields of the request."""
    warnings = [] if params is None else unknown_fields(params)
    return Response(with_warnings(body, warnings), media_type="application/json")
