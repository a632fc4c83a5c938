"""The history of a response: the chain that it continues, and items referenced by id."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

import msgspec
from pydantic import TypeAdapter, ValidationError

from gateway.answers.compaction import SummarySeal
from gateway.errors import DetailedError
from gateway.intake.json_guard import member_count
from gateway.intake.request_model import MAX_ID_CHARS
from gateway.responses.document import COMPLETED, INCOMPLETE
from gateway.responses.input_items import MAX_CALL_NAME_CHARS
from gateway.responses.output import OUTPUT_TEXT, input_item_id, is_conversation, response_of
from gateway.responses.payload import Conversation
from gateway.responses.schema import InputItem, InputPart, Items
from weft.api.router.v1.stored_response_service_pb2 import StoredResponse
from weft.kernel.errors.error_tree import WeftError, found_or_none, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.names import is_token

MAX_REFERENCED_RESPONSES = 256
"""Maximum number of responses whose items one input may reference."""
MAX_REFERENCED_BYTES = 48 * 1024 * 1024
"""Maximum size of those responses with their input: the default limit of a conversation (`router.responses`)."""

MAX_MEMBERS = 200_000
"""The default of `max_json_members` of a body."""

_items = TypeAdapter(Items)
_REFERENCE = "item_reference"


class StoredResponses(Protocol):
    """Reads responses that can be continued; see `ResponseClient`."""

    async def get(self, tenant: str, response_id: str) -> StoredResponse:
        """Returns one response. Raises NOT_FOUND."""
        ...

    async def chain(self, tenant: str, response_id: str) -> Sequence[StoredResponse]:
        """Returns the response and all those it continues, oldest first. Raises as `ResponseClient.chain`."""
        ...


async def conversation_of(
    store: StoredResponses | None,
    tenant: str,
    items: Sequence[InputItem],
    previous_id: str | None,
    *,
    max_members: int = MAX_MEMBERS,
    seal: SummarySeal | None = None,
    record: StoredResponse | None = None,
) -> Conversation:
    """Returns the complete conversation that a request continues. `seal`: of its summaries; `record`: where it is kept.

    `max_members`: maximum names in all JSON that is read, so that a short request does not occupy the gateway longer
    than a long one. Raises NOT_FOUND naming `previous_response_id`, INVALID_ARGUMENT naming a reference to an item
    that is not stored or has too many names, and SERVICE_UNAVAILABLE.
    """
    if record is not None and previous_id is not None:
        raise invalid_field("conversation", "must not be combined with 'previous_response_id'")
    reader = _Reader(max_members)
    field = "previous_response_id" if record is None else "conversation"
    chain = await _chain(store, tenant, previous_id) if previous_id else [] if record is None else [record]
    exchanges = {response.id: await reader.read(response, field) for response in chain}
    earlier = [item for exchange in exchanges.values() for item in exchange]
    if not any(item.kind == _REFERENCE for item in items):
        return Conversation(items, earlier, seal)
    known = {response_id: _by_id(exchange) for response_id, exchange in exchanges.items()}
    return Conversation(await _resolved(store, tenant, items, known, reader), earlier, seal)


class _Reader:
    """Reads stored responses for one request, within limits."""

    def __init__(self, max_members: int) -> None:
        self._max_members = max_members
        self._members = 0

    async def read(self, response: StoredResponse, field: str) -> list[InputItem]:
        """Returns the response's items. Raises INVALID_ARGUMENT naming `field` above the limits."""
        self._members += sum(map(member_count, _raw_items(response)))
        if self._members > self._max_members:
            raise invalid_field(
                field, f"names responses with more than {self._max_members} names in their JSON (max_json_members)"
            )
        # Yield to the event loop between responses.
        await asyncio.sleep(0)
        return exchange_of(response)


async def _chain(store: StoredResponses | None, tenant: str, response_id: str) -> Sequence[StoredResponse]:
    if store is None:
        raise _not_found("this gateway stores no responses")
    if not is_token(response_id, MAX_ID_CHARS) or is_conversation(response_id):
        # Not an id of this API. Databases and services reject such names in different ways.
        raise _not_found("there is no stored response with this id")
    try:
        return await store.chain(tenant, response_id)
    except WeftError as error:
        if error.reason is Reason.NOT_FOUND:
            raise _not_found(error.message) from None
        raise


def _not_found(why: str) -> WeftError:
    error = DetailedError(Reason.NOT_FOUND, f"previous_response_id: {why}", code="previous_response_not_found")
    error.metadata["field"] = "previous_response_id"
    return error


async def _resolved(
    store: StoredResponses | None,
    tenant: str,
    items: Sequence[InputItem],
    known: dict[str, dict[str, InputItem]],
    reader: _Reader,
) -> list[InputItem]:
    """Returns the items with resolved references; references to items that are not stored remain."""
    left = MAX_REFERENCED_BYTES
    named_already: set[str] = set()
    resolved = []
    for index, item in enumerate(items):
        field = f"input[{index}].id"
        if item.kind != _REFERENCE:
            resolved.append(item)
            continue
        home = response_of(item.id or "")
        if home is None or store is None:
            resolved.append(item)
            continue
        if home not in known:
            if len(known) >= MAX_REFERENCED_RESPONSES:
                raise invalid_field(
                    field, f"exceeds the number of referenced responses: at most {MAX_REFERENCED_RESPONSES}"
                )
            found = await found_or_none(store.get(tenant, home))
            left -= 0 if found is None else len(found.body) + len(found.items)
            if left < 0:
                raise invalid_field(field, f"exceeds {MAX_REFERENCED_BYTES} bytes of referenced responses")
            known[home] = {} if found is None else _by_id(await reader.read(found, field))
        named = known[home].get(item.id or "")
        if named is None:
            resolved.append(item)
            continue
        if item.id in named_already:
            # Repeated references of a few bytes could expand one long item without limit.
            raise invalid_field(field, "names an item twice")
        named_already.add(item.id or "")
        resolved.append(named)
    return resolved


def _by_id(exchange: Sequence[InputItem]) -> dict[str, InputItem]:
    return {item.id: item for item in exchange if item.id is not None}


def exchange_of(response: StoredResponse) -> list[InputItem]:
    """Returns the input and output of a stored response that can be sent to a model again."""
    items = [_as_message(item) for raw in _raw_items(response) for item in _read(raw, response.id)]
    return [item for item in items if item.kind != _REFERENCE and not _is_cut_call(item)]


def _as_message(item: InputItem) -> InputItem:
    """Returns the item; converts a text item of a pool response to a message."""
    if item.kind != OUTPUT_TEXT:
        return item
    parts = [InputPart(type=OUTPUT_TEXT, text=item.text or "")]
    return InputItem(id=item.id, role="assistant", status=item.status, content=parts)


class _Body(msgspec.Struct):
    """The fields read from a stored response."""

    output: msgspec.Raw = msgspec.Raw(b"[]")
    status: str = ""


def _raw_items(response: StoredResponse) -> tuple[bytes, bytes]:
    """Returns the input and the output as JSON lists."""
    return response.items, bytes(msgspec.json.decode(response.body, type=_Body).output)


def _is_cut_call(item: InputItem) -> bool:
    """Whether a call is incomplete or has no function name, so that it cannot be answered."""
    is_named = 0 < len(item.name or "") <= MAX_CALL_NAME_CHARS
    return item.kind == "function_call" and (item.status not in {None, "completed"} or not is_named)


def _read(raw: bytes, response_id: str) -> list[InputItem]:
    try:
        return _items.validate_json(raw)
    except ValidationError:
        raise WeftError(Reason.INTERNAL, f"the stored response {response_id} cannot be read") from None


def joined(*lists: bytes) -> bytes:
    """Returns JSON lists as one."""
    return msgspec.json.encode([item for each in lists for item in msgspec.json.decode(each, type=list[msgspec.Raw])])


def with_response(earlier: bytes, items: bytes, body: bytes) -> bytes:
    """Returns the items of a conversation after a response, as JSON: with its input and output if it is complete."""
    ended = msgspec.json.decode(body, type=_Body)
    return joined(earlier, items, bytes(ended.output)) if ended.status in {COMPLETED, INCOMPLETE} else earlier


def items_to_store(items: Sequence[InputItem], response_id: str) -> bytes:
    """Returns a response's input for storage: each item with type and id, content always as a list."""
    kept, seen = [], set[str]()
    for index, item in enumerate(items):
        # Duplicate ids would break pagination by `after`.
        given = item.id if item.id not in seen else None
        item_id = given or input_item_id(response_id, item.kind, index)
        seen.add(item_id)
        kept.append(_to_keep(item, item_id))
    return msgspec.json.encode(kept)


def _to_keep(item: InputItem, item_id: str) -> dict[str, object]:
    kept: dict[str, object] = {"id": item_id, "type": item.kind}
    kept |= item.model_dump(mode="json", exclude_none=True, exclude={"id", "type"})
    if item.kind == "message" and isinstance(item.content, str):
        part_type = "output_text" if item.role == "assistant" else "input_text"
        kept["content"] = [{"type": part_type, "text": item.content}]
    return kept
