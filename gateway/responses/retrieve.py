"""GET, DELETE and cancel of /v1/responses/{id}, and its input items."""

from collections.abc import Mapping, Sequence
from urllib.parse import parse_qsl

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from gateway.answers.stream import EventStream
from gateway.intake.headers import tenant_of
from gateway.intake.query import MAX_PARAMETERS
from gateway.request_facts import facts_of
from gateway.responses.background import StreamPosition
from gateway.responses.create import SURFACE, ResponsesDeps
from gateway.responses.kept import not_streamed_again
from gateway.responses.replay import FROM_THE_START
from gateway.responses.schema import MAX_ID_CHARS
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.names import require_token
from weft.kernel.reasons import Reason

MAX_ITEMS = 100
DEFAULT_ITEMS = 20
_PATH = "/v1/responses/{response_id}"
LIST_PARAMETERS = ("limit", "order", "after")
STREAM_PARAMETERS = ("stream", "starting_after")
_FLAGS = {"true": True, "1": True, "false": False, "0": False}
MAX_SEQUENCE_NUMBER = 2**53
"""Beyond it, clients that know only doubles cannot count."""


async def get_response(responses: ResponsesDeps, request: Request) -> Response:
    """A response that is kept, or as far as it is; one in the background also as its stream, from any event on."""
    tenant, response_id = _tenant_and_id(request)
    wanted = _parameters(request.scope)
    starting_after = _starting_after(wanted)
    if not _wants_stream(wanted):
        if "starting_after" in wanted:
            raise invalid_field("starting_after", "goes with stream=true")
        return _json(await responses.kept.body(tenant, response_id))
    background = responses.background
    if background is None:
        raise not_streamed_again()
    position = StreamPosition(max(0, starting_after))
    events = await responses.kept.events(tenant, response_id, position, starting_after)
    return EventStream(responses.deps, events, watches=background.watches, failure=position.broken_off)


async def delete_response(responses: ResponsesDeps, request: Request) -> Response:
    """Forget a response."""
    tenant, response_id = _tenant_and_id(request)
    await responses.kept.delete(tenant, response_id)
    deleted = {"id": response_id, "object": "response", "deleted": True}
    return _json(msgspec.json.encode(deleted))


async def cancel_response(responses: ResponsesDeps, request: Request) -> Response:
    """End a response that is being streamed; what there is of it is kept."""
    tenant, response_id = _tenant_and_id(request)
    return _json(await responses.kept.cancel(tenant, response_id))


async def list_input_items(responses: ResponsesDeps, request: Request) -> Response:
    """The input of a kept response, the last item first."""
    tenant, response_id = _tenant_and_id(request)
    wanted = _parameters(request.scope)
    items = await responses.kept.input_items(tenant, response_id)
    return _json(msgspec.json.encode(_page(items, wanted)))


def _wants_stream(wanted: Mapping[str, str]) -> bool:
    stream = _FLAGS.get(wanted.get("stream", "false").lower())
    if stream is None:
        raise invalid_field("stream", "must be true or false")
    return stream


def _starting_after(wanted: Mapping[str, str]) -> int:
    """The sequence number of the last event that the caller has. Raises INVALID_ARGUMENT for what is none."""
    given = wanted.get("starting_after")
    if given is None:
        return FROM_THE_START
    is_number = given.isascii() and given.isdigit() and len(given) <= len(str(MAX_SEQUENCE_NUMBER))
    if not is_number or int(given) > MAX_SEQUENCE_NUMBER:
        raise invalid_field("starting_after", f"must be a whole number from 0 to {MAX_SEQUENCE_NUMBER}")
    return int(given)


def _tenant_and_id(request: Request) -> tuple[str, str]:
    facts_of(request.scope).surface = SURFACE
    response_id = require_token(request.path_params["response_id"], "response_id", MAX_ID_CHARS)
    return tenant_of(request.scope), response_id


def _parameters(scope: Scope) -> Mapping[str, str]:
    """By name; clients send more than there are here, and some twice, as lists."""
    try:
        raw = scope["query_string"].decode("ascii")
        return dict(parse_qsl(raw, keep_blank_values=True, errors="strict", max_num_fields=MAX_PARAMETERS))
    except ValueError:
        message = f"the query must be at most {MAX_PARAMETERS} parameters in percent-encoded UTF-8"
        raise WeftError(Reason.MALFORMED_REQUEST, message) from None


def _page(items: Sequence[dict[str, object]], wanted: Mapping[str, str]) -> dict[str, object]:
    """Some of the items. Raises INVALID_ARGUMENT naming the parameter that is wrong."""
    order = wanted.get("order", "desc")
    if order not in {"asc", "desc"}:
        raise invalid_field("order", "must be 'asc' or 'desc'")
    limit = wanted.get("limit", str(DEFAULT_ITEMS))
    if not (limit.isascii() and limit.isdigit() and len(limit) <= len(str(MAX_ITEMS)) and 1 <= int(limit) <= MAX_ITEMS):
        raise invalid_field("limit", f"must be a whole number from 1 to {MAX_ITEMS}")
    ordered = list(items) if order == "asc" else list(reversed(items))
    start = 0
    if "after" in wanted:
        ids = [item["id"] for item in ordered]
        if wanted["after"] not in ids:
            raise invalid_field("after", "names no item of this response")
        start = ids.index(wanted["after"]) + 1
    page = ordered[start : start + int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + len(page) < len(ordered),
    }


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
