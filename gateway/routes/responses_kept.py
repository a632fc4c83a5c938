"""GET, DELETE and cancel of /v1/responses/{id}, and its input items."""

from collections.abc import Mapping, Sequence
from urllib.parse import parse_qsl

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.types import Scope

from gateway.facts import facts_of
from gateway.identity import tenant_of
from gateway.openapi import answers
from gateway.query import MAX_PARAMETERS
from gateway.responses.running import RunningResponses
from gateway.routes.responses import SURFACE, ResponsesParts
from gateway.schemas.responses_items import MAX_ID_CHARS
from gateway.schemas.responses_kept import DeletedResponse, ResponseItemList, ResponseObject
from weft.dispatch.stored_responses import ResponseStore, StoredResponse, response_not_found
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.names import require_token
from weft.kernel.reasons import Reason

MAX_ITEMS = 100
DEFAULT_ITEMS = 20
_PATH = "/v1/responses/{response_id}"
_LIST = ("limit", "order", "after")


def add_kept_responses(app: FastAPI, responses: ResponsesParts) -> None:
    """Add the routes. A tenant sees its own responses."""
    kept = _Kept(responses.store, responses.running)

    async def get_response(request: Request) -> Response:
        """A response that is kept, or as far as it has been streamed."""
        tenant, response_id = _asked(request)
        if _parameters(request.scope).get("stream", "false").lower() not in {"false", "0"}:
            raise invalid_field("stream", "must be false: a response is streamed to whoever asked for it")
        return _json(await kept.body(tenant, response_id))

    async def delete_response(request: Request) -> Response:
        """Forget a response."""
        tenant, response_id = _asked(request)
        await kept.delete(tenant, response_id)
        deleted = {"id": response_id, "object": "response", "deleted": True}
        return _json(msgspec.json.encode(deleted))

    async def cancel_response(request: Request) -> Response:
        """End a response that is being streamed; what there is of it is kept."""
        tenant, response_id = _asked(request)
        return _json(await kept.cancel(tenant, response_id))

    async def list_input_items(request: Request) -> Response:
        """The input of a kept response, the last item first."""
        tenant, response_id = _asked(request)
        wanted = _parameters(request.scope)
        items = await kept.input_items(tenant, response_id)
        return _json(msgspec.json.encode(_page(items, wanted)))

    for path, method, endpoint, extra in (
        (_PATH, "GET", get_response, answers(ResponseObject, path="response_id", query=("stream",))),
        (_PATH, "DELETE", delete_response, answers(DeletedResponse, path="response_id")),
        (f"{_PATH}/cancel", "POST", cancel_response, answers(ResponseObject, path="response_id")),
        (f"{_PATH}/input_items", "GET", list_input_items, answers(ResponseItemList, path="response_id", query=_LIST)),
    ):
        app.add_api_route(path, endpoint, methods=[method], tags=["openai"], openapi_extra=extra)


class _Kept:
    """Responses that are kept, and those that run here."""

    def __init__(self, store: ResponseStore | None, running: RunningResponses) -> None:
        self._store = store
        self._running = running

    async def body(self, tenant: str, response_id: str) -> bytes:
        running = self._running.find(tenant, response_id)
        return running.snapshot() if running is not None else (await self._get(tenant, response_id)).body

    async def delete(self, tenant: str, response_id: str) -> None:
        if self._running.find(tenant, response_id) is not None:
            raise WeftError(Reason.RESOURCE_IN_USE, f"response {response_id} is being streamed; cancel it first")
        if self._store is None:
            raise response_not_found(response_id)
        await self._store.delete(tenant, response_id)

    async def cancel(self, tenant: str, response_id: str) -> bytes:
        running = self._running.find(tenant, response_id)
        if running is None:
            await self._get(tenant, response_id)
        if running is None or running.is_concluded or running.is_ended:
            raise invalid_field("response_id", f"response {response_id} has come to its end and cannot be cancelled")
        return await running.cancel()

    async def input_items(self, tenant: str, response_id: str) -> Sequence[dict[str, object]]:
        running = self._running.find(tenant, response_id)
        raw = running.items if running is not None else (await self._get(tenant, response_id)).items
        if raw is None:
            raise response_not_found(response_id)
        items: list[dict[str, object]] = msgspec.json.decode(raw)
        return items

    async def _get(self, tenant: str, response_id: str) -> StoredResponse:
        if self._store is None:
            raise response_not_found(response_id)
        return await self._store.get(tenant, response_id)


def _asked(request: Request) -> tuple[str, str]:
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
